"""Fetches a policy from its sources into a directory of this machine: resumable, verified, and whole or not at all.

    PolicyCache.fetch: lock the cache → Download.fetch_manifest, .fetch_file for each file → rename the directory

A source is the origin, which serves `weights/` next to the trainer, or an inference server that has the policy (`weights.serve`).
An inference server fetches while it generates. The servers of one machine share a cache, and the first one fetches for all. A
policy is the one that the orchestrator named: manifest.json has the named SHA-256, and each file has the XXH3 of its record there.
"""

import functools
import hashlib
import itertools
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpcore
import httpx
import xxhash
from filelock import lock_descriptor

from trivet.backoff import backoff_s
from trivet.config.layout import MANIFEST, STABLE, step_name
from trivet.errors import FetchFailed, WeightsError
from trivet.key_names import key_name
from trivet.machine import make_private_directory
from trivet.process.lock import lock_directory, remove_if_free
from trivet.process.proxies import is_direct
from trivet.step_directories import list_steps
from trivet.storage.disk import format_bytes, free_bytes, is_full_disk
from trivet.storage.durable import FileRecord, remove_directory
from trivet.weights.delta import apply_deltas
from trivet.weights.manifest import MAX_MANIFEST_BYTES, Manifest, read_manifest, read_manifest_file, verify
from trivet.wire.versions import FetchablePolicy, PolicyVersion

logger = logging.getLogger(__name__)

STALL_TIMEOUT_S = 120.0
"""A fetch ends with an error after this long without a byte, while no source is busy. A large policy takes minutes."""
_TIMEOUT = httpx.Timeout(20.0, connect=5.0)
"""A source that sends nothing for this long, in seconds, is left: its machine may be lost."""
_MAX_PEERS_ASKED = 7
"""The most sources besides the origin that a round asks. A hundred readers that ask each other would send 10,000 requests."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0
_LOCK_POLL_INTERVAL_S = 0.1
_READ_BYTES = 1 << 20
_REFUSALS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
"""A source that answers so has another secret, and is not asked again."""
_make_ssl_context = functools.cache(httpx.create_ssl_context)
"""Returns the TLS context of all connections. Reading the certificates takes longer than ten requests."""
_PARTIAL = ".partial"
"""Suffix of a directory that is being fetched, and of a file in it that is not verified yet."""


def partial_directory(cache: Path, version: int, digest: str) -> Path:
    """Return the directory in which a policy is fetched. A file in it that has its final name is verified."""
    return cache / f".{step_name(version)}.{digest[:16]}{_PARTIAL}"


def draw_round(sources: Sequence[str], rng: random.Random) -> list[str]:
    """Return the sources to ask, in this order, before the next pause: the first, which is the origin, and some of the others.

    The order is random, so that readers spread over the sources that have the policy. Since each reader that has it becomes a
    source, the time grows with the logarithm of the number of readers.
    """
    drawn = [*sources[:1], *rng.sample(sources[1:], min(_MAX_PEERS_ASKED, max(0, len(sources) - 1)))]
    rng.shuffle(drawn)
    return drawn


def draw_pause_s(num_rounds: int, rng: random.Random) -> float:
    """Return the seconds before the next round. They differ between readers, so that not all ask at the same moment."""
    return backoff_s(num_rounds, first_s=_FIRST_PAUSE_S, max_s=_MAX_PAUSE_S) * rng.uniform(0.5, 1.0)


@dataclass(slots=True, kw_only=True)
class Download:
    """Fetches files of one policy into one directory. A file that an earlier process left there unfinished is resumed."""

    policy: FetchablePolicy
    directory: Path
    token: str
    """The run's secret."""
    environ: Mapping[str, str]
    """May name a proxy (`process.proxies`)."""
    require_wanted: Callable[[], None]
    """Called before each chunk and each pause. It raises an error to end the fetch."""
    rng: random.Random = field(default_factory=random.Random)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _heard_at: float = 0.0
    """When a source last gave a byte or was busy, by the clock."""

    def fetch_manifest(self) -> Manifest:
        """Fetch manifest.json. Raises FetchFailed if no source gives the one that the policy names."""
        self._fetch(MANIFEST, hashlib.sha256, self.policy.manifest_sha256, max_bytes=MAX_MANIFEST_BYTES)
        return read_manifest_file(self.directory / MANIFEST)

    def fetch_file(self, name: str, record: FileRecord) -> None:
        """Fetch the file `name`. Raises FetchFailed if no source gives the one that has `record`."""
        self._fetch(name, xxhash.xxh3_128, record.xxh3_128, max_bytes=record.num_bytes)

    def _fetch(self, name: str, make_digest: Callable[[], Any], expected: str, *, max_bytes: int) -> None:
        """Fetch the file `name`, unless it is there, so that its digest is the expected one."""
        path = self.directory / name
        partial = path.with_name(name + _PARTIAL)
        if path.exists():  # an earlier process fetched it, and its bits may have changed since
            path.rename(partial)
        digest, sources, problems = make_digest(), list(self.policy.sources), dict[str, str]()
        turns, self._heard_at = self._take_turns(sources, problems), self.clock()
        with partial.open("a+b") as file:
            file.seek(0)
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
            while digest.hexdigest() != expected:
                source, start = next(turns), file.tell()
                try:
                    url = f"{source}/weights/{self.policy.version}/{self.policy.digest}/{name}"
                    with closing(self._request(url, start)) as chunks:
                        for chunk in chunks:
                            self.require_wanted()
                            file.write(chunk)
                            digest.update(chunk)
                            self._heard_at = self.clock()
                            if file.tell() > max_bytes:
                                break
                except (httpx.HTTPError, httpx.InvalidURL, httpcore.NetworkError, httpcore.TimeoutException) as exc:
                    problems[source] = f"{type(exc).__name__}: {exc}"
                    if isinstance(exc, httpx.HTTPStatusError) and exc.response.status_code in _REFUSALS:
                        sources.remove(source)
                    continue
                if digest.hexdigest() != expected:
                    file.seek(0)
                    file.truncate()
                    digest = make_digest()
                    problems[source] = f"its {name} is not what was published"
                    if start == 0:  # else it is unknown whether this source is at fault, or the one that gave the first part
                        sources.remove(source)
        partial.rename(path)

    def _request(self, url: str, start: int) -> Generator[bytes]:
        """Yield the bytes of a file from `start` on.

        After the first part they come directly from the connection. httpx's parser would take 0.5 s of a core for each GB: at
        10 Gbit/s, over half of the time.
        """
        headers = {
            "Authorization": f"Bearer {self.token}",
            "Accept-Encoding": "identity",  # bytes are counted as they are in the file
            "Range": f"bytes={start}-",
        }
        trust_env, context = not is_direct(url, self.environ), _make_ssl_context()
        with httpx.stream("GET", url, headers=headers, timeout=_TIMEOUT, trust_env=trust_env, verify=context) as response:
            if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return  # the file has no more bytes
            if response.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
                self._heard_at = self.clock()  # it serves others first, and its transfers have limits of their own
            response.raise_for_status()
            chunks, connection = response.iter_raw(), response.extensions["network_stream"]
            yield (chunk := next(chunks, b""))  # all that came with the headers
            is_chunked = "Transfer-Encoding" in response.headers  # by a proxy; then the length says nothing
            num_left = -1 if is_chunked else int(response.headers.get("Content-Length", 0)) - len(chunk)
            while num_left > 0 and (chunk := connection.read(min(num_left, _READ_BYTES), _TIMEOUT.read)):
                yield chunk
                num_left -= len(chunk)
            if num_left != 0:  # it has no length, or ends too early, which is an error that httpx raises
                yield from chunks

    def _take_turns(self, sources: list[str], problems: Mapping[str, str]) -> Iterator[str]:
        """Yield the source to ask next, after a pause where one is due.

        Args:
            sources: the usable ones, the origin first. Unusable ones are removed meanwhile.
            problems: the last problem of each source that had one.
        """
        for num_rounds in itertools.count(1):
            yield from draw_round(sources, self.rng)
            self.require_wanted()
            reasons = "; ".join(f"{source}: {problem}" for source, problem in problems.items())
            if not sources:
                raise FetchFailed(f"no source of policy {self.policy.version} is usable: {reasons}")
            if self.clock() - self._heard_at > STALL_TIMEOUT_S:
                raise FetchFailed(
                    f"no source has given a byte of policy {self.policy.version} for {STALL_TIMEOUT_S:.0f} s: {reasons}"
                )
            self.sleep(draw_pause_s(num_rounds, self.rng))


class PolicyCache:
    """The policies of one run that servers of this machine fetched. Each server has a cache object; they share the directory.

    >>> cache = PolicyCache(Path("/tmp/weights"), run="0f3a", token="secret", environ=os.environ)
    >>> directory = cache.fetch(policy, max_bytes=1 << 40)
    >>> cache.settle(directory)  # once it is served: older ones may go
    """

    def __init__(self, root: Path, *, run: str, token: str, environ: Mapping[str, str]) -> None:
        """Make nothing yet.

        Args:
            root: the directory of the caches of all runs.
            run: a name that no other run has.
            token: the run's secret.
            environ: may name a proxy (`process.proxies`).
        """
        self._root = root
        self.directory = root / run
        self._token = token
        self._environ = environ
        self._wanted: FetchablePolicy | None = None
        self._run_lock: int | None = None
        self._locks: dict[Path, int] = {}
        """The descriptors of shared locks of the policies that this server needs, in the order in which they were fetched."""

    def fetch(self, policy: FetchablePolicy, *, max_bytes: int) -> Path:
        """Return the directory of `policy`, fetched if need be. Every byte in it is verified, and it stays until `settle`.

        It ends the fetch of another policy in this process. It blocks: call it in a thread.

        Args:
            max_bytes: a larger policy is refused before its files are fetched.

        Raises:
            FetchFailed: it could not be fetched now.
            WeightsError: it is too large.
        """
        self._wanted, started = policy, time.monotonic()
        self._open()
        final = self.directory / step_name(policy.version)
        partial = partial_directory(self.directory, policy.version, policy.digest)
        with self._locked(policy):
            if not self._has(policy.version, policy.digest, check=verify):  # an earlier process may have fetched it long ago
                for other in {*self.directory.glob(f".*{_PARTIAL}")} - {partial}:
                    shutil.rmtree(other)
                for old in list_steps(self.directory).values():
                    remove_if_free(old)
                remove_directory(final)  # a run that was resumed has published the version again
                self._fetch_files(policy, partial, max_bytes=max_bytes)
                partial.rename(final)
                logger.info("policy fetched version=%s seconds=%.2f", policy.version, time.monotonic() - started)
            if (previous := self._locks.pop(final, None)) is not None:
                os.close(previous)
            self._locks[final] = lock_directory(final, is_shared=True)
        return final

    def settle(self, directory: Path) -> None:
        """Note that this server serves the policy in `directory`. It needs none that it fetched earlier."""
        while directory in self._locks and (oldest := next(iter(self._locks))) != directory:
            os.close(self._locks.pop(oldest))

    def close(self) -> None:
        """Release the cache, and remove it unless another server uses it. May be called again."""
        self._wanted = None
        while self._locks:
            os.close(self._locks.popitem()[1])
        if self._run_lock is not None:
            os.close(self._run_lock)
            self._run_lock = None
            remove_if_free(self.directory)

    def _open(self) -> None:
        """Make the directories, and remove the caches of other runs that no process uses any more."""
        if self._run_lock is not None:
            return
        self._root.parent.mkdir(parents=True, exist_ok=True)
        for directory in (self._root, self.directory):
            make_private_directory(directory, setting=key_name("inference.weight_cache"))
        self._run_lock = lock_directory(self.directory, is_shared=True)
        for other in self._root.iterdir():
            remove_if_free(other)  # not this one, which is locked

    def _fetch_files(self, policy: FetchablePolicy, partial: Path, *, max_bytes: int) -> None:
        """Fetch the policy into the directory `partial`, so that it is complete."""
        download = Download(
            policy=policy,
            directory=partial,
            token=self._token,
            environ=self._environ,
            require_wanted=lambda: self._require_wanted(policy),
        )
        try:
            partial.mkdir(exist_ok=True)
            manifest = download.fetch_manifest()
            if manifest.num_bytes > max_bytes:
                raise WeightsError(f"policy {policy.version} has {manifest.num_bytes} bytes, more than the {max_bytes} allowed")
            if not self._make_from_deltas(manifest, download):
                # In another order on each machine, so that machines soon have different files to give to each other.
                for name in download.rng.sample(list(manifest.files), len(manifest.files)):
                    download.fetch_file(name, manifest.files[name])
            (partial / STABLE).touch()
        except OSError as exc:
            free = format_bytes(free_bytes(self.directory))
            if is_full_disk(exc):
                shutil.rmtree(partial, ignore_errors=True)
            raise FetchFailed(
                f"policy {policy.version} could not be written below {self.directory} ({exc.strerror}, {free} free): free disk "
                f"space there, or set {key_name('inference.weight_cache')} to a directory on a larger disk"
            ) from exc

    def _make_from_deltas(self, manifest: Manifest, download: Download) -> bool:
        """Make the policy from an earlier one in the cache, if deltas lead from it. Return whether it is complete."""
        bases = ((delta.base_version, delta.base_digest) for delta in manifest.deltas)
        held = [number for number, base in enumerate(bases) if self._has(*base, check=read_manifest)]
        if not held:
            return False
        deltas = manifest.deltas[held[-1] :]
        try:
            for delta in deltas:
                download.fetch_file(delta.name, delta.file)
            paths, base = [download.directory / delta.name for delta in deltas], step_name(deltas[0].base_version)
            apply_deltas(paths, self.directory / base, download.directory, manifest=manifest, suffix=_PARTIAL)
        except (FetchFailed, WeightsError) as exc:
            logger.warning("fetching policy %s whole, because its delta is of no use: %s", manifest.version, exc)
            for unfinished in download.directory.glob(f"*{_PARTIAL}"):
                unfinished.unlink()
            return False
        return True

    def _has(self, version: PolicyVersion, digest: str, *, check: Callable[[Path], Manifest]) -> bool:
        """Return whether the cache has a policy, by its manifest alone or by every byte, as `check` reads them."""
        with suppress(WeightsError, OSError):
            return check(self.directory / step_name(version)).digest == digest
        return False

    @contextmanager
    def _locked(self, policy: FetchablePolicy) -> Generator[None]:
        """Hold the lock of the cache: one server of this machine fetches and removes at a time."""
        file = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not lock_descriptor(file, blocking=False):
                self._require_wanted(policy)
                time.sleep(_LOCK_POLL_INTERVAL_S)
            yield
        finally:
            os.close(file)

    def _require_wanted(self, policy: FetchablePolicy) -> None:
        if self._wanted != policy:
            raise FetchFailed(f"policy {policy.version} is not fetched any more, because another one is wanted")
