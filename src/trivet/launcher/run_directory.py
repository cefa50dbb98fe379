"""Gives a run its output directory: one run per directory, nothing of another run in the way, an identity for each."""

import secrets
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from trivet.checkpoints.commit import committed_steps, discard_staging, resolve_resume_step, verify_checkpoint
from trivet.checkpoints.fork import adopt, choose_fork
from trivet.checkpoints.run_record import read_run, write_run
from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.schema.base import Section
from trivet.config.schema.shared import RunIdentity
from trivet.errors import CheckpointError, ConfigError, RunDirectoryBusy
from trivet.key_names import key_name
from trivet.process.lock import DEAD_MACHINE_S, FileLock, LockWait, holder_of
from trivet.schedulers.node_variables import is_restarted_job
from trivet.storage.durable import write_atomically
from trivet.telemetry.events import drop_torn_line
from trivet.wire.versions import Step

RESULTS = ("weights", "checkpoints", "events.jsonl", "metrics", "rollouts", "batches", "evals")
"""Entries that are the result of a run; a fresh run never writes over them."""
ENTRIES = (*RESULTS, "logs", "configs", "status.json", "run.json", ".reports", ".compute_dtype.json")
"""Everything that a run writes and leaves, besides its lock."""

_SHORT_WAIT = LockWait(timeout_s=0.3)
"""Long enough for a process that asks who holds the lock, and takes it for a moment."""


class RunDirectory:
    """An output directory that belongs to this process until it ends."""

    def __init__(self, layout: RunLayout, *, wait: LockWait = _SHORT_WAIT) -> None:
        self.layout = layout
        self._has_new_secret = False
        self._lock = FileLock(layout.lock, what=f"output_dir {str(layout.root)!r}", guards=layout.root, wait=wait)

    def __enter__(self) -> "RunDirectory":
        """Take the directory, which is made when it is not there.

        Raises:
            RunDirectoryBusy: a live run holds the directory. `wait` may name another error.
            ConfigError: the directory cannot be written.
        """
        try:
            self.layout.root.mkdir(parents=True, exist_ok=True)
            self._lock.__enter__()
        except OSError as exc:
            raise ConfigError(
                f"output_dir {str(self.layout.root)!r} cannot be written: {exc.strerror}; choose another"
            ) from exc
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the directory up; the kernel does the same when the process ends in any way."""
        self._lock.close()

    def keep_over_exec(self) -> None:
        """Keep the directory taken when another program replaces this process."""
        self._lock.keep_over_exec()

    def choose_start(self, *, resume_step: int | None, does_clean: bool, resume_from: Path | None = None) -> Step | None:
        """Decide where the run starts, and make sure that nothing of another run is in the way. Changes nothing.

        Args:
            resume_step: as configured; -1 is the newest committed one.
            resume_from: output directory of another run, whose checkpoint a new run here starts from.

        Returns:
            The committed step to go on from, here or in `resume_from`; None for a start from the model.

        Raises:
            ConfigError: there are results and neither resume nor clean was asked for, or both were; there is nothing to
                resume; the directory holds such names but was not written by a run.
        """
        if resume_step is not None and resume_from is None:
            if does_clean:
                raise ConfigError(
                    f"{key_name('--clean')} removes the checkpoints that {key_name('ckpt.resume_step')} needs; use one of the two"
                )
            try:
                return resolve_resume_step(self.layout, resume_step)
            except CheckpointError as exc:
                raise ConfigError(str(exc)) from exc
        found = self._entries()
        if found and read_run(self.layout) is None and not self._is_of_measurement(found):
            raise ConfigError(
                f"output_dir {str(self.layout.root)!r} holds {', '.join(found)} but no run.json: nothing of ours wrote them, "
                "so they are left alone; choose another output_dir"
            )
        if not found and (foreign := self._foreign_entries()):
            raise ConfigError(
                f"output_dir {str(self.layout.root)!r} holds {foreign[0]} and nothing of a run: it is a directory for something "
                f"else; choose a new one, e.g. --output-dir {self.layout.root / 'run'}"
            )
        results = [name for name in RESULTS if name in found]
        if results and not does_clean:
            raise ConfigError(_describe_results(self.layout, results))
        return None if resume_from is None else choose_fork(self.layout, source=resume_from, resume_step=resume_step)

    def _is_of_measurement(self, found: Sequence[str]) -> bool:
        """Return whether only a server or the command `eval` left `found`, and no role that was started by hand runs here."""
        is_in_use = any(holder_of(self.layout.role_lock(role)) is not None for role in ("trainer", "orchestrator"))
        return ".reports" in found and not is_in_use and set(found) <= {".reports", ".compute_dtype.json", "logs", "evals"}

    def identify(self, *, is_resumed: bool) -> RunIdentity:
        """Return the identity of the same run's next attempt when resumed, else that of a new run."""
        before = read_run(self.layout)
        if is_resumed and before is not None:
            return RunIdentity(id=before.id, attempt=before.attempt + 1)
        return RunIdentity(id=f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")

    def renew_secret(self) -> None:
        """Forget the secret of the run that this directory held. A role that was started by hand for the new run may have made the
        new run's already; that one stays.
        """
        if not self._has_new_secret and read_run(self.layout) is not None:
            self.layout.secret.unlink(missing_ok=True)
        self._has_new_secret = True

    def begin(
        self, run: RunIdentity, *, resumed_from: Step | None, resume_from: Path | None = None, versions: Iterable[int] = ()
    ) -> None:
        """Write run.json. A new run first removes what an earlier one left; a resumed run what was never committed.

        Args:
            resume_from: output directory of another run, whose checkpoint `resumed_from` becomes this new run's first.
            versions: of that run's policies, those that the new one needs besides the checkpoint's own.

        Raises:
            ConfigError: the checkpoint to resume from is damaged; nothing was removed.
        """
        if resumed_from is None or resume_from is not None:
            self.renew_secret()
            for name in self._entries():
                _remove(self.layout.root / name)
            if resumed_from is not None and resume_from is not None:
                adopt(resume_from, resumed_from, into=self.layout, versions=versions)
        else:
            try:
                verify_checkpoint(self.layout, resumed_from)
            except CheckpointError as exc:
                raise ConfigError(str(exc)) from exc
            self._remove_uncommitted()
        write_run(self.layout, run)

    def begin_next(self, run: RunIdentity) -> None:
        """Prepare the directory for the next attempt of the run that holds it: no role writes to it now."""
        self._remove_uncommitted()
        write_run(self.layout, run)

    def _remove_uncommitted(self) -> None:
        discard_staging(self.layout)
        drop_torn_line(self.layout.events)

    def _foreign_entries(self) -> list[str]:
        """Return the entries that no run writes. Hidden files, such as locks or notes of a file system, do not count.

        Nor does what the command wrote that submitted this run as a job.
        """
        names = {path.name for path in self.layout.root.iterdir()}
        submissions = {path.name for path in (self.layout.slurm, self.layout.kubernetes, self.layout.skypilot)}
        return sorted(name for name in names - submissions if not name.startswith("."))

    def _entries(self) -> list[str]:
        return [name for name in ENTRIES if (self.layout.root / name).exists()]


def wait_of_job(environ: Mapping[str, str]) -> LockWait:
    """Return how long a run on one machine waits for the directory.

    A job that its scheduler has started again waits for its own earlier start, whose machine may have died. If the lock stays,
    the job ends with an exit code after which it is started once more. Any other run hardly waits: somebody else has started the
    run that holds the directory.
    """
    if not is_restarted_job(environ):
        return _SHORT_WAIT
    return LockWait(timeout_s=DEAD_MACHINE_S, error=partial(RunDirectoryBusy, is_retried=True))


def write_configs(configs: Mapping[Path, Section]) -> None:
    """Write what the roles read. Headers and arguments of environments may hold secrets, so only the owner may read it."""
    for path, section in configs.items():
        write_atomically(path, to_toml(section).encode(), is_private=True)


def _describe_results(layout: RunLayout, results: list[str]) -> str:
    steps = committed_steps(layout)
    resume = f"add {key_name('--trainer.ckpt.resume-step -1')} to go on from step {steps[-1]}, " if steps else ""
    return (
        f"output_dir {str(layout.root)!r} holds {', '.join(results)} of an earlier run or measurement; "
        f"{resume}add {key_name('--clean')} to remove them, or choose another output_dir"
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
