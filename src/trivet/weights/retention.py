"""Decides when a published policy may go, from what readers acknowledged, and removes it."""

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from trivet.config.layout import STABLE, RunLayout
from trivet.durable import DECODE_ERRORS, remove_directory, write_json_atomically
from trivet.errors import WeightsError
from trivet.wire.versions import START_VERSION, PolicyVersion


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's statement of the version that it serves."""

    version: PolicyVersion
    """The version that the reader has loaded."""
    time: float
    """Unix seconds."""
    expires: float | None = None
    """Unix seconds from which on it does not count: of a reader that comes and goes, and may be killed. None: never."""


def acknowledge(layout: RunLayout, reader: str, version: PolicyVersion, *, lifetime_s: float | None = None) -> None:
    """Record that `reader` serves `version` and will read nothing older.

    A reader registers, with the version it already holds, before its first load. Until then nothing is retained for it.

    Args:
        lifetime_s: seconds for which it counts, unless it is repeated; None: until the reader writes another.
    """
    now = time.time()
    expires = None if lifetime_s is None else now + lifetime_s
    write_json_atomically(_reader_file(layout, reader), Acknowledgement(version=version, time=now, expires=expires))


def forget_reader(layout: RunLayout, reader: str) -> None:
    """Remove the acknowledgement of a reader that needs nothing any more."""
    _reader_file(layout, reader).unlink(missing_ok=True)


def reader_versions(layout: RunLayout) -> dict[str, PolicyVersion]:
    """Return the version that each reader acknowledged last, by its name; what has expired is left out.

    Raises:
        WeightsError: a file in weights/readers/ is not an acknowledgement.
    """
    versions: dict[str, PolicyVersion] = {}
    for path in sorted(layout.readers.glob("[!.]*.json")):
        try:
            acknowledgement = msgspec.json.decode(path.read_bytes(), type=Acknowledgement)
        except FileNotFoundError:  # forgotten between the listing and the reading
            continue
        except DECODE_ERRORS as exc:
            raise WeightsError(f"{path} is not an acknowledgement: {exc}; remove it") from exc
        if acknowledgement.expires is None or acknowledgement.expires > time.time():
            versions[unquote(path.stem)] = acknowledgement.version
    return versions


def forget_readers_after(layout: RunLayout, version: PolicyVersion) -> None:
    """Drop what readers said about policies newer than `version`, which no longer exist."""
    for reader, held in reader_versions(layout).items():
        if held > version:
            _reader_file(layout, reader).unlink(missing_ok=True)


def reference_version(step: int, *, interval: int | None) -> PolicyVersion:
    """Return the policy that step `step` + 1 is compared with: the last multiple of `interval`, without one the start model."""
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
    """Return the versions that nobody needs, oldest first.

    A reader may load anything newer than what it holds, at any moment, so everything from the oldest reader on stays.

    Args:
        latest: newest published policy; it always stays.
        keep_recent: the newest policies that stay besides, for readers that lag by design: max_async_level.
        in_use: what readers acknowledged last.
        kept: what resumes start from (`needed_to_resume`).
        keep_interval: every multiple stays for ever.
    """
    oldest_needed = min([latest - keep_recent, *in_use])
    return [
        version
        for version in sorted(published)
        if version < oldest_needed and version not in kept and not (keep_interval and version % keep_interval == 0)
    ]


def needed_to_resume(steps: Sequence[int], *, lag: int) -> set[int]:
    """Return the policies that a run needs which goes back to one of `steps`.

    Args:
        lag: how many policies behind a resumed run samples its first batch: max_async_level when the run is deterministic,
            else 0, because it then starts from the newest.
    """
    return {max(step - behind, 0) for step in steps for behind in range(lag + 1)}


def retire(layout: RunLayout, version: PolicyVersion) -> None:
    """Remove a published policy; a reader that looks meanwhile finds it whole or not at all."""
    remove_directory(layout.weights_step(version), marker=STABLE)


def _reader_file(layout: RunLayout, reader: str) -> Path:
    return layout.readers / f"{quote(reader, safe='')}.json"
