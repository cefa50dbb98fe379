"""The paths of everything in an output directory. No other module spells these names."""

import re
from dataclasses import dataclass
from pathlib import Path

from trivet.key_names import NAMES_VARIABLE

STABLE = "STABLE"
COMMITTED = "COMMITTED"
MANIFEST = "manifest.json"
DELTA = "from_{}.delta"
"""Name of a file beside a policy's own files: what changed from the policy of that version to the next (`weights.delta`)."""
NOT_OF_POLICY = (MANIFEST, STABLE, DELTA.format("*"))
"""Patterns for the files in a policy's directory that are not part of the policy."""
SECRET_FILE = "TRIVET_SECRET_FILE"
"""The variable that names the file of the run's secret."""
JOB_RETRIED = "JOB_RETRIED"
"""The variable that `schedulers.job` sets when an earlier start of the same job left a note."""
VENVS = "TRIVET_VENVS"
"""The variable that names the directory with the virtual environments of environments."""
OWN_VARIABLES = frozenset({SECRET_FILE, VENVS, NAMES_VARIABLE})
"""The variables with the prefix TRIVET_ that set no configuration key. Every other one sets a key."""
ROLLOUTS_FILE = "rollouts.jsonl"
RESULTS_FILE = "results.jsonl"
BATCH_SUFFIX = ".msgpack"
"""The suffix of a recorded batch's file name, after `step_N`."""
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")


def step_name(step: int) -> str:
    """Return the name `step_N` of a step's directory."""
    return f"step_{step}"


def parse_step(name: str) -> int | None:
    """Return the N of `step_N`, in ASCII digits without leading zeros, or None when `name` has another form."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


class _SubPath:
    """An attribute of `RunLayout` whose value is a path below the output directory."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, layout: "RunLayout", owner: object = None) -> Path:
        return layout.root.joinpath(*self._parts)


@dataclass(frozen=True, slots=True)
class RunLayout:
    """The paths below one output directory. Nothing is created or read. Paths with a clear name have no docstring."""

    root: Path

    weights = _SubPath("weights")
    readers = _SubPath("weights", "readers")
    """The directory with a file for each reader of weights. The file holds the version that the reader has loaded."""
    checkpoints = _SubPath("checkpoints")
    logs = _SubPath("logs")
    metrics = _SubPath("metrics")
    events = _SubPath("events.jsonl")
    configs = _SubPath("configs")
    """The directory with the resolved configuration of each role."""
    slurm = _SubPath("slurm")
    """The directory of batch scripts and of their jobs' logs. It exists before the run itself starts."""
    kubernetes = _SubPath("kubernetes")
    """The directory of a Kubernetes manifest and its configuration. In the pods, each start leaves notes for later ones here."""
    skypilot = _SubPath("skypilot")
    """The directory of a SkyPilot task and its configuration. On the nodes, each start also leaves notes for later starts here."""
    secret = _SubPath(".secret")
    yielded_step = _SubPath(".yielded_step")
    """The file with the number of the last step that `RLTrainer` or `SFTTrainer` yielded to the loop of a Python program."""
    lock = _SubPath(".lock")
    """The file that is locked by the process that owns the directory."""
    scratch_note = _SubPath(".scratch")
    """The file that names the directory of the live run's temporary files."""
    servers = _SubPath(".servers")
    """The file with the addresses of the inference servers of a run over several nodes. A restarted server may have another one."""
    run_file = _SubPath("run.json")
    """The file with the run's id and attempt. A resumed run takes its id from here."""
    compute_dtype = _SubPath(".compute_dtype.json")
    """The file with the dtype of the run: `config.compute_dtype.ChosenDtype`."""
    status = _SubPath("status.json")
    """The run's state, written by its launcher: `wire.status.RunStatus`."""
    reports = _SubPath(".reports")
    """The directory of reports. Each process of the run writes one about itself: `wire.status.ProcessReport`."""
    batches = _SubPath("batches")
    rollouts = _SubPath("rollouts")
    evals = _SubPath("evals")
    explained = _SubPath("explained")
    """The directory of what `trivet explain` has computed. No role reads or writes it."""

    def role_lock(self, role: str) -> Path:
        """Return the file that a role's process locks, so that no second process of the role can run here."""
        return self.root / f".lock.{role}"

    def scratch_note_of(self, node: int) -> Path:
        """Return the file that names the temporary directory of a node other than the first."""
        return self.root / f".scratch.{node}"

    def report_file(self, role: str, rank: int = 0) -> Path:
        """Return the file with the newest report of a process about itself."""
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

    def explained_step(self, step: int) -> Path:
        """Return the file with the shares of the tokens of a step."""
        return self.explained / f"{step_name(step)}.msgpack"

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
        """Return the log of an environment's workers. The slash of a hub id is replaced, because it would name a directory."""
        return self.logs / "env_workers" / f"{env.replace('/', '--')}.log"

    def eval_worker_log(self, env: str) -> Path:
        """Return the log of the command `eval`'s workers. It is a separate file, because `eval` may measure a live run."""
        return self.logs / "eval" / self.env_worker_log(env).name

    def rank_log(self, rank: int) -> Path:
        """Return the log of a rank of the trainer."""
        return self.logs / "trainer" / f"rank_{rank}.stdout"
