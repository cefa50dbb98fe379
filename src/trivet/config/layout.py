"""The paths of everything in an output directory. No other module spells these names."""

import re
from dataclasses import dataclass
from pathlib import Path

from trivet.key_names import VARIABLE

STABLE = "STABLE"
COMMITTED = "COMMITTED"
MANIFEST = "manifest.json"
SECRET_FILE = "TRIVET_SECRET_FILE"
"""The variable that names the file of the run's secret."""
VENVS = "TRIVET_VENVS"
"""The variable that names the directory of the virtual environments of environments."""
OWN_VARIABLES = frozenset({SECRET_FILE, VENVS, VARIABLE})
"""Variables with trivet's prefix that set no configuration key, as every other one does."""
ROLLOUTS_FILE = "rollouts.jsonl"
RESULTS_FILE = "results.jsonl"
BATCH_SUFFIX = ".msgpack"
"""The end of a recorded batch's name, behind `step_N`."""
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")


def step_name(step: int) -> str:
    """Return the name `step_N` of a directory of one step."""
    return f"step_{step}"


def parse_step(name: str) -> int | None:
    """Return the N of `step_N`, in ASCII digits without leading zeros, or None when `name` has another form."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


class _Below:
    """A path below the output directory."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, layout: "RunLayout", owner: object = None) -> Path:
        return layout.root.joinpath(*self._parts)


@dataclass(frozen=True, slots=True)
class RunLayout:
    """The paths below one output directory. Nothing is created or read. Those whose name says what they hold have no string."""

    root: Path

    weights = _Below("weights")
    readers = _Below("weights", "readers")
    """The directory with a file per reader of weights, which holds the version that it has loaded."""
    checkpoints = _Below("checkpoints")
    logs = _Below("logs")
    metrics = _Below("metrics")
    events = _Below("events.jsonl")
    configs = _Below("configs")
    """The directory of resolved configurations, a file per role."""
    slurm = _Below("slurm")
    """The directory of batch scripts and of the logs of their jobs, which are older than the run itself."""
    kubernetes = _Below("kubernetes")
    """The directory of a JobSet's manifest and configuration, and, in the pods, of what each start notes for later ones."""
    skypilot = _Below("skypilot")
    """The directory of a task of SkyPilot and its configuration, and, on its nodes, of what each start notes for later ones."""
    secret = _Below(".secret")
    yielded_step = _Below(".yielded_step")
    """The file with the last step that a loop of a Python program over the run's steps had."""
    lock = _Below(".lock")
    """The file that the process which owns the directory locks."""
    scratch_note = _Below(".scratch")
    """The file that names the directory of the live run's temporary files."""
    servers = _Below(".servers")
    """The file with the address of each inference server of a run of several nodes; one may come back at another address."""
    control = _Below(".control.json")
    """The file that says where the first node of a run of several listens for the others."""
    lease = _Below(".lease.json")
    """The file that says which first node leads a run of several: `launcher.nodes.lease.Lease`."""
    run_file = _Below("run.json")
    """The file of run id and attempt, from which a resumed run takes its identity."""
    compute_dtype = _Below(".compute_dtype.json")
    """The file of the dtype that the run computes in and serves: `config.compute_dtype.ChosenDtype`."""
    status = _Below("status.json")
    """The run's state, written by its launcher: `wire.status.RunStatus`."""
    reports = _Below(".reports")
    """The directory of reports, one by each process of the run about itself: `wire.status.ProcessReport`."""
    batches = _Below("batches")
    rollouts = _Below("rollouts")
    evals = _Below("evals")

    def role_lock(self, role: str) -> Path:
        """Return the file that the only process of a role locks, whoever started it."""
        return self.root / f".lock.{role}"

    def scratch_note_of(self, node: int) -> Path:
        """Return the same for a node that is not the first."""
        return self.root / f".scratch.{node}"

    def report_file(self, role: str, rank: int = 0) -> Path:
        """Return the file of the newest report of a process about itself."""
        return self.reports / (f"{role}.rank_{rank}.json" if rank else f"{role}.json")

    def weights_step(self, version: int) -> Path:
        """Return the directory of the policy of a version."""
        return self.weights / step_name(version)

    def checkpoint_step(self, step: int) -> Path:
        """Return the directory of the checkpoint of a step."""
        return self.checkpoints / step_name(step)

    def recorded_batch(self, step: int) -> Path:
        """Return the file of the recorded batch of a step."""
        return self.batches / f"{step_name(step)}{BATCH_SUFFIX}"

    def rollouts_step(self, step: int) -> Path:
        """Return the directory of the rollouts of a step."""
        return self.rollouts / step_name(step)

    def evals_step(self, step: int, env: str) -> Path:
        """Return the directory of results of an environment at a step."""
        return self.evals / step_name(step) / env

    def log_file(self, name: str) -> Path:
        """Return the file of a log: `rl.log`, `inference.stdout`, `orchestrator.stdout`, `trainer.stdout`."""
        return self.logs / name

    def env_worker_log(self, env: str) -> Path:
        """Return the log of the workers of an environment. The slash of a hub id makes no directory."""
        return self.logs / "env_workers" / f"{env.replace('/', '--')}.log"

    def eval_worker_log(self, env: str) -> Path:
        """Return the log of the workers of the command `eval`, which may measure a run that is going on."""
        return self.logs / "eval" / self.env_worker_log(env).name

    def rank_log(self, rank: int) -> Path:
        """Return the log of a rank of the trainer."""
        return self.logs / "trainer" / f"rank_{rank}.stdout"
