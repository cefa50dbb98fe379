"""Locks and prepares the directories of a run: the output directory, and a directory for temporary files."""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from trivet.checkpoints.commit import committed_steps, discard_staging, resolve_resume_step, verify_checkpoint
from trivet.checkpoints.resume import adopt, choose_fork
from trivet.checkpoints.run_record import read_run, write_run
from trivet.config.dump import to_toml
from trivet.config.layout import JOB_RETRIED, RunLayout
from trivet.config.schema.base import Section
from trivet.config.schema.shared import RunIdentity
from trivet.errors import CheckpointError, ConfigError, RunDirectoryBusy
from trivet.key_names import key_name
from trivet.launcher.plan import ORCHESTRATOR, ProcessSpec
from trivet.machine import compile_cache_directory
from trivet.process.lock import DEAD_MACHINE_S, FileLock, LockWait, holder_of, lock_directory, remove_if_free
from trivet.storage.durable import write_atomically
from trivet.telemetry.events import drop_torn_line
from trivet.wire.versions import Step

RESULTS = ("weights", "checkpoints", "events.jsonl", "metrics", "rollouts", "batches", "evals")
"""Names of files and directories that are the result of a run. A new run never writes over them."""
ENTRIES = (*RESULTS, "logs", "configs", "status.json", "run.json", ".reports", ".compute_dtype.json")
"""Names of everything that a run leaves in its directory, besides its lock."""

_SHORT_WAIT = LockWait(timeout_s=0.3)
"""A process that checks who holds the lock takes it for a moment. This wait is longer than that."""

_RESTARTED_JOB = (JOB_RETRIED, "SLURM_RESTART_COUNT")
"""Variables that say that a scheduler has started this job before. SLURM counts; for the others `schedulers.job` leaves a note."""
_SCRATCH_PREFIX = "trivet-"
_MAX_SCRATCH_LENGTH = 70
"""Limit of characters in the directory's path: a socket's path may have 107, and vLLM's name of the socket takes 37."""


class RunDirectory:
    """An output directory that this process has locked within the block."""

    def __init__(self, layout: RunLayout, *, wait: LockWait = _SHORT_WAIT) -> None:
        self.layout = layout
        self.lock = FileLock(layout.lock, what=f"output_dir {str(layout.root)!r}", guards=layout.root, wait=wait)

    def __enter__(self) -> "RunDirectory":
        """Lock the directory. It is made if it does not exist.

        Raises:
            RunDirectoryBusy: a live run has locked the directory. `wait` may name another error.
            ConfigError: the directory cannot be written.
        """
        try:
            self.layout.root.mkdir(parents=True, exist_ok=True)
            self.lock.__enter__()
        except OSError as exc:
            raise ConfigError(
                f"output_dir {str(self.layout.root)!r} cannot be written: {exc.strerror}; choose another"
            ) from exc
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.close()

    def choose_start(self, *, resume_step: int | None, does_clean: bool, resume_from: Path | None = None) -> Step | None:
        """Decide where the run starts, and check that no results of another run would be lost. Nothing is changed.

        Args:
            resume_step: the configured step; -1 names the newest committed one.
            does_clean: remove the results of an earlier run.
            resume_from: output directory of another run, from whose checkpoint a new run starts here.

        Returns:
            The committed step to continue from, here or in `resume_from`; None for a start from the model.

        Raises:
            ConfigError: there are results, and the user asked neither to resume nor to clean; the user asked for both; there is
                nothing to resume; or the directory was not written by a run.
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
        # Files that only a server or the command `eval` left are allowed, unless a role that was started by hand runs here.
        is_in_use = any(holder_of(self.layout.role_lock(role)) is not None for role in ("trainer", "orchestrator"))
        is_of_measurement = ".reports" in found and set(found) <= {".reports", ".compute_dtype.json", "logs", "evals"}
        if found and read_run(self.layout) is None and (is_in_use or not is_of_measurement):
            raise ConfigError(
                f"output_dir {str(self.layout.root)!r} holds {', '.join(found)} but no run.json: nothing of ours wrote them, "
                "so they are left alone; choose another output_dir"
            )
        submissions = {path.name for path in (self.layout.slurm, self.layout.kubernetes, self.layout.skypilot)}
        names = {path.name for path in self.layout.root.iterdir()} - submissions
        # Hidden files, such as locks or files of a file system, do not count as foreign.
        if not found and (foreign := sorted(name for name in names if not name.startswith("."))):
            raise ConfigError(
                f"output_dir {str(self.layout.root)!r} holds {foreign[0]} and nothing of a run: it is a directory for something "
                f"else; choose a new one, e.g. --output-dir {self.layout.root / 'run'}"
            )
        results = [name for name in RESULTS if name in found]
        if results and not does_clean:
            steps = committed_steps(self.layout)
            resume = f"add {key_name('--trainer.ckpt.resume-step -1')} to go on from step {steps[-1]}, " if steps else ""
            raise ConfigError(
                f"output_dir {str(self.layout.root)!r} holds {', '.join(results)} of an earlier run or measurement; "
                f"{resume}add {key_name('--clean')} to remove them, or choose another output_dir"
            )
        return None if resume_from is None else choose_fork(self.layout, source=resume_from, resume_step=resume_step)

    def identify(self, *, is_resumed: bool) -> RunIdentity:
        """Return the identity of the next attempt of the same run if it is resumed; else the identity of a new run."""
        before = read_run(self.layout)
        if is_resumed and before is not None:
            return RunIdentity(id=before.id, attempt=before.attempt + 1)
        return RunIdentity(id=f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")

    def renew_secret(self) -> None:
        """Remove the secret of the run that this directory held, so that the new run gets its own.

        Without a run.json there was no such run: then the secret may be that of a role that was started by hand, and stays.
        """
        if read_run(self.layout) is not None:
            self.layout.secret.unlink(missing_ok=True)

    def begin(
        self, run: RunIdentity, *, resumed_from: Step | None, resume_from: Path | None = None, versions: Iterable[int] = ()
    ) -> None:
        """Prepare the directory for the first attempt of this launcher, and write run.json.

        A new run first removes the files of an earlier run. A resumed run removes files of checkpoints that were never committed.

        Args:
            resume_from: output directory of another run, whose checkpoint `resumed_from` becomes the first of this new run.
            versions: further policies of that run which the new run needs.

        Raises:
            ConfigError: the checkpoint to resume from is damaged; nothing was removed.
        """
        if resumed_from is not None and resume_from is None:
            try:
                verify_checkpoint(self.layout, resumed_from)
            except CheckpointError as exc:
                raise ConfigError(str(exc)) from exc
        else:
            for path in (self.layout.root / name for name in self._entries()):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            if resumed_from is not None and resume_from is not None:
                adopt(resume_from, resumed_from, into=self.layout, versions=versions)
        self.begin_next(run)

    def begin_next(self, run: RunIdentity) -> None:
        """Prepare the directory for the next attempt of its run. No role may write to it meanwhile."""
        discard_staging(self.layout)
        drop_torn_line(self.layout.events)
        write_run(self.layout, run)

    def _entries(self) -> list[str]:
        return [name for name in ENTRIES if (self.layout.root / name).exists()]


def wait_of_job(environ: Mapping[str, str]) -> LockWait:
    """Return how long a run waits for the lock of its directory.

    When a scheduler starts a job again, the machine of the earlier start may have died, and the file system may keep its lock for a
    while. So the job waits. If the lock stays, the job ends with an exit code after which the scheduler starts it once more. Any
    other run waits only a moment, because another user or command holds the directory.
    """
    if all(environ.get(name, "0") in ("", "0") for name in _RESTARTED_JOB):
        return _SHORT_WAIT
    return LockWait(timeout_s=DEAD_MACHINE_S, error=partial(RunDirectoryBusy, is_retried=True))


def write_configs(configs: Mapping[Path, Section]) -> None:
    """Write the configurations of the roles. They may have secrets in headers and arguments, so only the owner may read them."""
    for path, section in configs.items():
        write_atomically(path, to_toml(section).encode(), is_private=True)


class Scratch:
    """A new directory for the temporary files of servers and ranks. It is removed with its content at the end of the run.

    Processes that are killed leave temporary files: vLLM its sockets, ranks their directory. The path is written to a note in the
    output directory. If a launcher is killed, the next run reads the note and removes the directory, unless it is locked.
    """

    def __init__(self, note: Path) -> None:
        self._note = note
        self._held = ExitStack()

    def __enter__(self) -> "Scratch":
        """Make the directory, and remove the one that a killed launcher left.

        Raises:
            ConfigError: there is no directory for temporary files.
        """
        with suppress(OSError):  # mostly there is no note
            leftover = Path(self._note.read_text().strip())
            if leftover.name.startswith(_SCRATCH_PREFIX):
                remove_if_free(leftover)
        with ExitStack() as begun:
            try:
                self.directory = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX))
                if len(str(self.directory)) > _MAX_SCRATCH_LENGTH:
                    self.directory.rmdir()
                    self.directory = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir="/tmp"))
                begun.callback(shutil.rmtree, self.directory, ignore_errors=True)
                begun.callback(os.close, lock_directory(self.directory))
            except OSError as exc:
                raise ConfigError(f"no temporary directory can be made: {exc}; free disk space there, or set TMPDIR") from exc
            write_atomically(self._note, f"{self.directory}\n".encode())
            self._held = begun.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()
        if not self.directory.exists():
            with suppress(OSError):  # a note about a directory that does not exist does no harm
                self._note.unlink()

    def redirect(self, spec: ProcessSpec) -> ProcessSpec:
        """Return `spec` with this directory for its temporary files. Caches that later runs use stay in the usual directory.

        The orchestrator's spec is not changed: its environment workers have their own directories.
        """
        if spec.name == ORCHESTRATOR:
            return spec
        root = Path(tempfile.gettempdir())
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": str(compile_cache_directory()),
            "DATA_GYM_CACHE_DIR": str(root / "data-gym-cache"),
            "TIKTOKEN_RS_CACHE_DIR": str(root / "tiktoken-rs-cache"),
        }
        return replace(spec, env={**spec.env, "TMPDIR": str(self.directory)}, env_defaults={**caches, **spec.env_defaults})
