"""Section for a command that SLURM carries out on its nodes."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from trivet.config.sections.base import MAX_PROCESSES, Section

OneLine = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\n\r\x00]*$")]
"""Text of one line: it stands in a directive of a batch script."""
SlurmCommand = Literal["rl", "sft", "eval"]
"""The commands that can be jobs."""


class SlurmConfig(Section):
    """The table that has a command written as a batch script in output_dir/slurm and submitted. The job carries the command out."""

    job_name: OneLine = "trivet"
    """Name that squeue shows."""
    project_dir: Path = Path()
    """Directory in which the job runs, which the node must see too; paths are relative to it."""
    partition: OneLine | None = None
    """Unset: the cluster's default, as for every key here that has none."""
    account: OneLine | None = None
    """Account that the time is charged to."""
    qos: OneLine | None = None
    """Quality of service."""
    constraint: OneLine | None = None
    """Features that the node must have."""
    nodelist: OneLine | None = None
    """Nodes to choose from."""
    exclude: OneLine | None = None
    """Nodes not to choose."""
    time: OneLine | None = None
    """Time limit, as sbatch takes it: `4:00:00`, `2-12`."""
    gpus_per_node: int | None = Field(default=None, ge=0, le=MAX_PROCESSES)
    """GPUs to ask for; unset: those that the configuration names. 0 for a run on CPUs."""
    cpus_per_task: int | None = Field(default=None, ge=1)
    """Cores of the run on each node, all roles together. Unset and not exclusive: one, with most clusters."""
    mem: OneLine | None = None
    """Memory of the run on each node, all roles together, as sbatch takes it: `64G`."""
    exclusive: bool = False
    """Take whole nodes."""
    pre_run_command: str | None = None
    """Shell text that runs on the node before the command, such as `module load cuda`."""
    requeue: bool = True
    """Queue the job again when its time is up before the command is done, when a node fails, or when the command fails in a way
    that may pass. It goes on from the newest commit."""
    kill_on_node_fail: bool = False
    """Let SLURM end a job of several nodes when one of them fails, as it does by default. If false, SLURM takes the node out of
    the job, and the run goes on as `[deployment]` and `[recovery]` allow."""
    signal_seconds: int = Field(default=300, ge=1, le=65_535)
    """Seconds before the time limit at which the command is asked to end; SLURM may ask up to a minute earlier."""
    srun_args: list[OneLine] = []
    """Words for srun, such as the flags of a container plug-in."""
    sbatch_args: list[OneLine] = []
    """Further directives of the script, a line each: `--mail-type=END`."""
