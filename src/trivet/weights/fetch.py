"""Fetches a policy from its sources into a directory of this machine: resumable, verified, and whole or not at all.

    PolicyCache.fetch: lock the cache → PolicyFetch.fetch_manifest, .fetch_file for each file → rename the directory

An inference server calls it while it generates. The servers of one machine share a cache, and the first one fetches for all. A
policy is the one that the orchestrator named: manifest.json has the named SHA-256, and each file has the size and the XXH3 of its
record there. The server verifies the whole once more when it loads it.
"""

import hashlib
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import xxhash
from filelock import lock_descriptor

from trivet.config.layout import DELTA, MANIFEST, STABLE, step_name
from trivet.errors import FetchFailed, WeightsError
from trivet.key_names import key_name
from trivet.machine import make_private_directory
from trivet.process.lock import remove_if_free, share_directory
from trivet.step_directories import list_steps
from trivet.storage.disk import format_bytes, free_bytes, is_full_disk
from trivet.storage.durable import FileRecord, hash_file, remove_directory
from trivet.weights.delta import MAX_DELTA_SHARE, apply_deltas
from trivet.weights.manifest import MAX_MANIFEST_BYTES, Manifest, read_manifest, read_manifest_file, verify
from trivet.weights.sources import PolicySource, Problem, SourceChoice, SourceProblem
from trivet.wire.versions import FetchablePolicy, PolicyVersion

logger = logging.getLogger(__name__)

STALL_TIMEOUT_S = 120.0
"""A fetch ends with an error after this long without a byte, while no source is busy. A large policy takes minutes."""
_ABSENT_TIMEOUT_S = 10.0
"""A fetch ends with an error when the origin has said for this long that it does not have the policy: it was removed."""
_LOCK_TIMEOUT_S = 600.0
"""Longest wait for another server of this machine that fetches. Then this server is asked again later, and waits again."""
_LOCK_POLL_INTERVAL_S = 0.1
_PARTIAL = ".partial"
"""Suffix of a directory that is being fetched, and of a file in it that is not verified yet."""


def partial_directory(cache: Path, version: int, digest: str) -> Path:
    """Return the directory in which a policy is fetched. A file in it that has its final name is verified."""
    return cache / f".{step_name(version)}.{digest[:16]}{_PARTIAL}"


class PolicyFetch:
    """Fetches files of one policy into one directory. A file that an earlier process left there unfinished is resumed."""

    def __init__(
        self,
        policy: FetchablePolicy,
        directory: Path,
        sources: Mapping[str, PolicySource],
        *,
        is_wanted: Callable[[], bool] = lambda: True,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Ask nothing yet.

        Args:
            sources: each source of `policy`, by its address.
            is_wanted: asked before each chunk. If it returns False, the fetch ends with an error.
        """
        self._policy = policy
        self._directory = directory
        self._sources = sources
        self._is_wanted = is_wanted
        self._clock = clock
        self._sleep = sleep
        self._choice = SourceChoice(policy.sources, rng=rng)
        self._progress_at = clock()
        self._absent_since: float | None = None
        """When the origin began to say that it does not have the policy; None unless it said so last."""

    def fetch_manifest(self) -> Manifest:
        """Fetch manifest.json. Raises FetchFailed if no source gives the one that the policy names."""
        path = self._directory / MANIFEST
        path.with_name(MANIFEST + _PARTIAL).unlink(missing_ok=True)  # its size is unknown, so it cannot be resumed

        def is_right(path: Path, _: FileRecord | None) -> bool:
            return hashlib.sha256(path.read_bytes()).hexdigest() == self._policy.manifest_sha256

        self._fetch(MANIFEST, max_bytes=MAX_MANIFEST_BYTES, is_right=is_right)
        return read_manifest_file(path)

    def fetch_file(self, name: str, record: FileRecord) -> None:
        """Fetch the file `name`. Raises FetchFailed if no source gives the one that has `record`."""
        self._fetch(name, max_bytes=record.num_bytes, is_right=lambda path, found: (found or hash_file(path)) == record)

    def _fetch(self, name: str, *, max_bytes: int, is_right: Callable[[Path, FileRecord | None], bool]) -> None:
        path = self._directory / name
        partial = path.with_name(name + _PARTIAL)
        is_done = path.exists() and is_right(path, None)
        while not is_done:
            source = self._next_source()
            try:
                start, record = self._append(source, name, partial, max_bytes=max_bytes)
                is_done = is_right(partial, record)
                if is_done:
                    partial.rename(path)
                    self._choice.succeed(source)
                else:
                    partial.unlink()  # if another source or process began the file, it is unknown which of them is at fault
                    if start == 0:
                        raise SourceProblem(Problem.WRONG, f"its {name} is not what was published")
            except SourceProblem as exc:
                self._note_problem(source, exc)

    def _append(self, source: str, name: str, partial: Path, *, max_bytes: int) -> tuple[int, FileRecord | None]:
        """Append the rest of a file to `partial`. What arrives before a SourceProblem stays.

        Returns:
            The size before; if it was 0, also the record of all bytes, so that they need not be read again.
        """
        start = num_bytes = partial.stat().st_size if partial.exists() else 0
        if start and start >= max_bytes:
            return start, None
        digest = xxhash.xxh3_128()
        chunks = self._sources[source].read(self._policy, name, start=start)
        with closing(chunks), partial.open("ab", buffering=0) as file:
            for chunk in chunks:
                self._require_wanted()
                unwritten = memoryview(chunk)
                while unwritten:  # a disk that fills up takes a part; the next write raises
                    unwritten = unwritten[file.write(unwritten) :]
                num_bytes += len(chunk)
                digest.update(chunk)
                self._progress_at, self._absent_since = self._clock(), None
                if num_bytes > max_bytes:
                    partial.unlink()
                    raise SourceProblem(Problem.WRONG, f"its {name} is larger than what was published")
        return start, FileRecord(num_bytes, digest.hexdigest()) if start == 0 else None

    def _next_source(self) -> str:
        """Return the source to ask, after a pause where one is due."""
        while (source := self._choice.next()) is None:
            self._require_wanted()
            now, version = self._clock(), self._policy.version
            reasons = "; ".join(f"{source} {problem}" for source, problem in self._choice.problems.items())
            if not self._choice.usable:
                raise FetchFailed(f"no source of policy {version} is usable: {reasons}")
            if self._absent_since is not None and now - self._absent_since > _ABSENT_TIMEOUT_S:
                raise FetchFailed(f"policy {version} was removed from weights/ before it was fetched: {reasons}")
            if now - self._progress_at > STALL_TIMEOUT_S:
                raise FetchFailed(f"no source has given a byte of policy {version} for {STALL_TIMEOUT_S:.0f} s: {reasons}")
            self._sleep(self._choice.pause_s)
        return source

    def _require_wanted(self) -> None:
        if not self._is_wanted():
            raise FetchFailed(f"policy {self._policy.version} is not fetched any more, because another one is wanted")

    def _note_problem(self, source: str, problem: SourceProblem) -> None:
        logger.debug("policy=%s source=%s: %s", self._policy.version, source, problem)
        self._choice.fail(source, problem)
        if problem.problem is Problem.BUSY:
            self._progress_at = self._clock()  # its transfers have limits of their own
        if source == self._policy.sources[0]:
            since = self._absent_since if self._absent_since is not None else self._clock()
            self._absent_since = since if problem.problem is Problem.ABSENT else None


class PolicyCache:
    """The policies of one run that servers of this machine fetched. Each server has a cache object; they share the directory.

    >>> cache = PolicyCache(Path("/tmp/weights"), run="0f3a", make_source=make_source)
    >>> directory = cache.fetch(policy, max_bytes=1 << 40)
    >>> cache.settle(policy.version)  # once it is served: older ones may go
    """

    def __init__(self, root: Path, *, run: str, make_source: Callable[[str], PolicySource]) -> None:
        """Make nothing yet.

        Args:
            root: the directory of the caches of all runs.
            run: a name that no other run has.
        """
        self._root = root
        self.directory = root / run
        self._make_source = make_source
        self._rng = random.Random()
        self._wanted: FetchablePolicy | None = None
        self._run_lock: int | None = None
        self._locks: dict[PolicyVersion, int] = {}
        """The descriptors of shared locks of the policies that this server needs, in the order in which they were served."""

    def fetch(self, policy: FetchablePolicy, *, max_bytes: int) -> Path:
        """Return the directory of `policy`, fetched if need be. It stays until two other policies were served.

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
            if not self._has_whole(final, policy):
                for other in {*self.directory.glob(f".*{_PARTIAL}")} - {partial}:
                    shutil.rmtree(other)
                for old in list_steps(self.directory).values():
                    remove_if_free(old)
                remove_directory(final)  # a run that was resumed has published the version again
                self._fetch_files(policy, partial, max_bytes=max_bytes)
                partial.rename(final)
                logger.info("policy fetched version=%s seconds=%.2f", policy.version, time.monotonic() - started)
            self._keep(policy.version, final)
        return final

    def settle(self, version: PolicyVersion) -> None:
        """Note that `version` is served now. It and the one that was served before stay in the cache."""
        if version in self._locks:
            self._locks[version] = self._locks.pop(version)
            for old in list(self._locks)[:-2]:
                os.close(self._locks.pop(old))

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
        self._run_lock = share_directory(self.directory)
        for other in self._root.iterdir():
            remove_if_free(other)  # not this one, which is locked

    def _fetch_files(self, policy: FetchablePolicy, partial: Path, *, max_bytes: int) -> None:
        """Fetch the policy into the directory `partial`, so that it is complete."""
        sources = {address: self._make_source(address) for address in policy.sources}

        def begin(version: PolicyVersion, digest: str, directory: Path) -> PolicyFetch:
            directory.mkdir(parents=True, exist_ok=True)
            wanted = msgspec.structs.replace(policy, version=version, digest=digest)
            return PolicyFetch(wanted, directory, sources, is_wanted=lambda: self._wanted == policy, rng=self._rng)

        try:
            fetch = begin(policy.version, policy.digest, partial)
            manifest = fetch.fetch_manifest()
            if manifest.num_bytes > max_bytes:
                raise WeightsError(f"policy {policy.version} has {manifest.num_bytes} bytes, more than the {max_bytes} allowed")
            missing = [] if self._make_from_deltas(manifest, partial, begin) else list(manifest.files)
            # In another order on each machine, so that machines soon have different files to give to each other.
            for name in self._rng.sample(missing, len(missing)):
                fetch.fetch_file(name, manifest.files[name])
            (partial / STABLE).touch()
        except OSError as exc:
            free = format_bytes(free_bytes(self.directory))
            if is_full_disk(exc):
                shutil.rmtree(partial, ignore_errors=True)
            raise FetchFailed(
                f"policy {policy.version} could not be written below {self.directory} ({exc.strerror}, {free} free): free disk "
                f"space there, or set {key_name('inference.weight_cache')} to a directory on a larger disk"
            ) from exc

    def _make_from_deltas(
        self, manifest: Manifest, partial: Path, begin: Callable[[PolicyVersion, str, Path], PolicyFetch]
    ) -> bool:
        """Make the policy from an earlier one in the cache, if small deltas lead from it. Return whether it is complete."""
        held = [number for number, delta in enumerate(manifest.deltas) if self._holds(delta.base_version, delta.base_digest)]
        chain = manifest.deltas[held[-1] :] if held else ()
        if not chain or sum(delta.file.num_bytes for delta in chain) > MAX_DELTA_SHARE * manifest.num_bytes:
            return False
        results = [*((delta.base_version, delta.base_digest) for delta in chain[1:]), (manifest.version, manifest.digest)]
        scratch = partial.with_name(f"{partial.name}.deltas{_PARTIAL}")
        # The last delta is fetched into `partial`, from where others can fetch it.
        directories = [*(scratch / str(version) for version, _ in results[:-1]), partial]
        try:
            for delta, result, directory in zip(chain, results, directories, strict=True):
                begin(*result, directory).fetch_file(DELTA, delta.file)
            (scratch / "result").mkdir(parents=True)
            base, paths = self.directory / step_name(chain[0].base_version), [directory / DELTA for directory in directories]
            apply_deltas(paths, base, scratch / "result", base_digest=chain[0].base_digest, manifest=manifest)
            for name in manifest.files:
                (scratch / "result" / name).rename(partial / name)
            return True
        except (FetchFailed, WeightsError) as exc:
            logger.warning("fetching policy %s whole, because its delta is of no use: %s", manifest.version, exc)
            return False
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _holds(self, version: PolicyVersion, digest: str) -> bool:
        with suppress(WeightsError, OSError):
            return read_manifest(self.directory / step_name(version)).digest == digest
        return False

    @staticmethod
    def _has_whole(directory: Path, policy: FetchablePolicy) -> bool:
        """Return whether `directory` holds every byte of `policy`."""
        with suppress(WeightsError, OSError):
            return verify(directory).digest == policy.digest
        return False

    def _keep(self, version: PolicyVersion, directory: Path) -> None:
        if (previous := self._locks.pop(version, None)) is not None:
            os.close(previous)
        self._locks[version] = share_directory(directory)

    @contextmanager
    def _locked(self, policy: FetchablePolicy) -> Generator[None]:
        """Hold the lock of the cache: one server of this machine fetches and removes at a time."""
        file = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        try:
            while not lock_descriptor(file, blocking=False):
                if self._wanted != policy or time.monotonic() > deadline:
                    raise FetchFailed(f"policy {policy.version} was not fetched: another server fetches into {self.directory}")
                time.sleep(_LOCK_POLL_INTERVAL_S)
            yield
        finally:
            os.close(file)
