"""Decides from the readers' acknowledgements which published policies are no longer needed, and removes them."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from trivet.config.layout import STABLE, RunLayout
from trivet.errors import WeightsError
from trivet.storage.durable import DECODE_ERRORS, is_listed, remove_directory, write_json_atomically
from trivet.wire.versions import START_VERSION, PolicyVersion


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's statement of the version that it serves."""

    version: PolicyVersion
    """The version that the reader has loaded."""
    time: float
    """Unix time of the acknowledgement by the reader's clock, in seconds. It differs in each renewal."""
    lifetime_s: float | None = None
    """Seconds without a renewal after which the acknowledgement is ignored; None: never. `eval` sets it, since it may be killed."""


def acknowledge(layout: RunLayout, reader: str, version: PolicyVersion, *, lifetime_s: float | None = None) -> None:
    """Record that `reader` serves `version` and will read nothing older.

    A reader registers, with the version it already holds, before its first load. Until then nothing is retained for it.

    Args:
        lifetime_s: seconds after which the acknowledgement expires unless the reader calls this again; None: it never expires.
    """
    acknowledgement = Acknowledgement(version=version, time=time.time(), lifetime_s=lifetime_s)
    write_json_atomically(_reader_file(layout, reader), acknowledgement)


def forget_reader(layout: RunLayout, reader: str) -> None:
    """Remove the acknowledgement of a reader that needs no policy any more."""
    _reader_file(layout, reader).unlink(missing_ok=True)


class LiveReaders:
    """Finds the readers of a run whose acknowledgements have not expired.

    A reader may be on another machine, whose clock differs. So the age of an acknowledgement is the time, by this process's clock,
    since this process read it for the first time.
    """

    def __init__(self, layout: RunLayout, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout = layout
        self._clock = clock
        self._seen: dict[str, tuple[Acknowledgement, float]] = {}
        """The newest acknowledgement of each reader, and the time at which this process first read it."""

    def versions(self) -> dict[str, PolicyVersion]:
        """Return the version that each reader acknowledged last, by the reader's name. Expired acknowledgements are left out."""
        now, seen_before = self._clock(), self._seen
        self._seen = {}
        for reader, acknowledgement in _read_acknowledgements(self._layout):
            previous, since = seen_before.get(reader, (None, now))
            self._seen[reader] = (acknowledgement, since if acknowledgement == previous else now)
        return {
            reader: acknowledgement.version
            for reader, (acknowledgement, since) in self._seen.items()
            if acknowledgement.lifetime_s is None or now - since <= acknowledgement.lifetime_s
        }


def _read_acknowledgements(layout: RunLayout) -> Iterator[tuple[str, Acknowledgement]]:
    """Yield the name of each reader and its newest acknowledgement."""
    for path in sorted(layout.readers.glob("[!.]*.json")) if is_listed(layout.readers) else ():
        try:
            acknowledgement = msgspec.json.decode(path.read_bytes(), type=Acknowledgement)
        except FileNotFoundError:  # `forget_reader` removed it after the directory was listed
            continue
        except DECODE_ERRORS as exc:
            raise WeightsError(f"{path} is not an acknowledgement: {exc}; remove it") from exc
        yield unquote(path.stem), acknowledgement


def forget_readers_after(layout: RunLayout, version: PolicyVersion) -> None:
    """Remove the acknowledgements of policies newer than `version`, which no longer exist after a resume."""
    for reader, acknowledgement in _read_acknowledgements(layout):
        if acknowledgement.version > version:
            forget_reader(layout, reader)


def reference_version_after(step: int, *, interval: int | None) -> PolicyVersion:
    """Return the version of the reference policy (`loss.beta`) that the step after `step` uses.

    It is the last multiple of `interval` up to `step`; without an interval it is the start model.
    """
    return PolicyVersion(step - step % interval if interval else START_VERSION)


def retirable(
    published: Sequence[PolicyVersion],
    *,
    latest: PolicyVersion,
    keep_recent: int,
    in_use: Collection[PolicyVersion],
    kept: Collection[int],
    keep_interval: int | None = None,
) -> list[PolicyVersion]:
    """Return the versions that can be removed, oldest first.

    Every version from the oldest acknowledged one on stays, because a reader may load any version newer than its own at any moment.

    Args:
        latest: newest published policy; it always stays.
        keep_recent: number of versions before `latest` that stay too, for readers that lag by design (max_async_level).
        in_use: the version that each reader acknowledged last.
        kept: versions that a resume or the loss still needs (`needed_to_resume`, `reference_version_after`).
        keep_interval: versions that are a multiple of it are never removed; None: no such versions.
    """
    oldest_needed = min([latest - keep_recent, *in_use])
    return [
        version
        for version in sorted(published)
        if version < oldest_needed and version not in kept and not (keep_interval and version % keep_interval == 0)
    ]


def needed_to_resume(steps: Sequence[int], *, lag: int) -> set[int]:
    """Return the versions that a run needs if it resumes from one of `steps`.

    Args:
        lag: number of versions by which the policy of the first batch after a resume may be older than the resumed step. It is
            max_async_level for a deterministic run, and else 0, because the run then samples from the newest policy.
    """
    return {max(step - age, 0) for step in steps for age in range(lag + 1)}


def retire(layout: RunLayout, version: PolicyVersion) -> None:
    """Remove a published policy atomically: a reader that opens it meanwhile sees the whole policy or none."""
    remove_directory(layout.weights_step(version), marker=STABLE)


def _reader_file(layout: RunLayout, reader: str) -> Path:
    return layout.readers / f"{quote(reader, safe='')}.json"
