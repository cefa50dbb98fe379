"""Writes the batch script of a command, and submits it to SLURM.

The script runs one task by srun and knows nothing of a run's roles. Its only other work is the end of the time limit: SLURM signals
the script alone, which passes the signal on to the launcher, so that the launcher ends its roles in order; then the job is queued
again. `schedulers.job` is what srun runs.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trivet.config.layout import RunLayout
from trivet.config.loading.dump import to_toml
from trivet.config.loading.load import LoadedConfig
from trivet.config.sections.evaluation import EvalConfig
from trivet.config.sections.rl import RLConfig
from trivet.config.sections.sft import SftConfig
from trivet.config.sections.slurm import SlurmConfig
from trivet.errors import ConfigError, Diverged, SubmissionFailed
from trivet.process.lifetime import module_command
from trivet.shown_text import shorten
from trivet.storage.durable import write_atomically

Submittable = TypeVar("Submittable", RLConfig, SftConfig, EvalConfig)
_DIRECTIVES = ("job_name", "partition", "account", "qos", "constraint", "nodelist", "exclude", "time", "cpus_per_task")
"""Keys that sbatch takes by the same name, with dashes."""
_SBATCH_TIMEOUT_S = 60.0
"""sbatch itself gives a controller that does not answer up after a multiple of its MessageTimeout, 10 s by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A command as a job of one node."""

    command: str
    """Name of the command: rl, sft or eval."""
    config: SlurmConfig
    directory: Path
    """Where script, configuration and log lie; absolute."""
    num_gpus: int
    python: str
    """The interpreter that the node runs."""

    @property
    def script(self) -> Path:
        """The file of the script."""
        return self.directory / f"{self.command}.sbatch"

    @property
    def configuration(self) -> Path:
        """The file of the command's configuration."""
        return self.directory / f"{self.command}.toml"


def submit(loaded: LoadedConfig[Submittable], is_dry_run: bool, *, command: str) -> int | None:
    """Write the script of a configuration with a table [slurm], and submit it; return the exit code.

    Args:
        loaded: not yet settled for this machine: the job settles it for its own.
        is_dry_run: write only.
        command: rl, sft or eval.

    Returns:
        None without the table: the command runs here.

    Raises:
        ConfigError: the table and other keys do not fit together.
        SubmissionFailed: sbatch refused the script, or there is none.
    """
    config = loaded.config
    if config.slurm is None:
        return None
    _check(config, config.slurm)
    job = Job(
        command=command,
        config=config.slurm,
        directory=RunLayout(config.slurm.project_dir.absolute() / _output_dir(config)).slurm,
        num_gpus=count_gpus(config),
        python=sys.executable,
    )
    job.directory.mkdir(parents=True, exist_ok=True)
    write_atomically(job.configuration, to_toml(config.model_copy(update={"slurm": None})).encode(), is_private=True)
    write_atomically(job.script, make_script(job).encode())
    if is_dry_run:
        print(to_toml(config, origins=loaded.origins, is_masked=True))
        print(f"# wrote {job.script}; submit it with: sbatch {shlex.quote(str(job.script))}")
        return 0
    print(f"job {run_sbatch(job.script)} submitted; its log: {job.directory}/JOB.log, its script: {job.script}")
    return 0


def _check(config: RLConfig | SftConfig | EvalConfig, slurm: SlurmConfig) -> None:
    if isinstance(config, RLConfig):
        needed = config.recovery.preemption_grace_s + config.shutdown_timeout_s
        if slurm.requeue and slurm.signal_seconds < needed:
            raise ConfigError(
                f"slurm.signal_seconds ({slurm.signal_seconds}) is less than recovery.preemption_grace_s + shutdown_timeout_s "
                f"({needed:g}): the time limit would end the run before its commit; raise slurm.signal_seconds"
            )
    if isinstance(config, EvalConfig) and config.output_dir is None:
        raise ConfigError("[slurm] needs output_dir: the job's script and log are written there; set it")


def _output_dir(config: RLConfig | SftConfig | EvalConfig) -> Path:
    assert config.output_dir is not None
    return config.output_dir


def count_gpus(config: RLConfig | SftConfig | EvalConfig) -> int:
    """Return the GPUs that a command asks for."""
    assert config.slurm is not None
    if config.slurm.gpus_per_node is not None:
        return config.slurm.gpus_per_node
    if isinstance(config, EvalConfig):
        return 0
    if isinstance(config, SftConfig):
        return 0 if config.device == "cpu" else config.num_ranks or 1
    serving = config.inference_gpu_ids if config.inference is not None else []
    training = config.trainer_gpu_ids if config.trainer.device != "cpu" else []
    teaching = (config.teacher_gpu_ids or []) if config.teacher_inference is not None else []
    return max([*serving, *training, *teaching], default=-1) + 1


def make_script(job: Job) -> str:
    """Return the text of the batch script."""
    slurm = job.config
    task = module_command("trivet.schedulers.job", job.command, str(job.configuration), python=job.python)
    lines = [
        "#!/bin/bash",
        f"# Runs `{job.command}` as a job of SLURM. Written by the command itself, which overwrites it when it is started again.",
        *(f"#SBATCH {word}" for word in _directives(job)),
        "set -euo pipefail",
        f"cd -- {shlex.quote(str(slurm.project_dir.absolute()))}",
        *([slurm.pre_run_command] if slurm.pre_run_command else []),
        "",
        f'pid_file={shlex.quote(str(job.directory))}/"$SLURM_JOB_ID.pid"',
        'step="" num_signals=0',
        # Before the process id is written, the step as a whole is ended.
        """trap 'num_signals=$((num_signals + 1)); kill -TERM "$(cat "$pid_file" 2> /dev/null || echo "$step")" || true' TERM""",
        """trap 'rm -f -- "$pid_file"' EXIT""",
        f"srun --nodes=1 --ntasks=1 --cpu-bind=none --kill-on-bad-exit=1 --unbuffered {shlex.join(slurm.srun_args)}".rstrip()
        + " \\",
        f'  {shlex.join(task)} --pid-file "$pid_file" &',
        "step=$!",
        "while true; do",
        "  before=$num_signals code=0",
        '  wait "$step" || code=$?',
        "  # A signal ends the wait, not the step.",
        '  if [[ $num_signals == "$before" ]]; then break; fi',
        "done",
    ]
    if slurm.requeue:
        lines += [
            "# The time is up, and the run is not over. One that was cancelled is not running any more.",
            f"if [[ $num_signals != 0 && $code != 0 && $code != {Diverged.exit_code} ]]; then",
            '  if [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "  fi",
            "fi",
        ]
    return "\n".join([*lines, 'exit "$code"', ""])


def _directives(job: Job) -> Iterator[str]:
    slurm = job.config
    for name in _DIRECTIVES:
        if (value := getattr(slurm, name)) is not None:
            yield f"--{name.replace('_', '-')}={shlex.quote(str(value))}"
    yield "--nodes=1"
    yield "--ntasks-per-node=1"
    if job.num_gpus:
        yield f"--gres=gpu:{job.num_gpus}"
    if slurm.exclusive:
        yield "--exclusive"
    yield f"--output={shlex.quote(str(job.directory).replace('%', '%%'))}/%j.log"
    yield "--open-mode=append"
    yield "--requeue" if slurm.requeue else "--no-requeue"
    yield f"--signal=B:TERM@{slurm.signal_seconds}"
    yield from slurm.sbatch_args


def run_sbatch(script: Path, *, program: Sequence[str] = ("sbatch",)) -> str:
    """Submit a script; return the job's id.

    Raises:
        SubmissionFailed: sbatch is not installed, does not answer or refuses.
    """
    advice = f"the script is {script}: submit it where sbatch is, or mend what it says and start the command again"
    try:
        done = subprocess.run(
            [*program, "--parsable", str(script)], capture_output=True, text=True, timeout=_SBATCH_TIMEOUT_S, check=False
        )
    except FileNotFoundError as exc:
        raise SubmissionFailed(f"[slurm] is set, but this machine has no sbatch; {advice}") from exc
    except subprocess.TimeoutExpired as exc:
        raise SubmissionFailed(f"sbatch did not answer within {_SBATCH_TIMEOUT_S:g} s; {advice}") from exc
    if done.returncode:
        raise SubmissionFailed(f"sbatch refused the job ({shorten(done.stderr.strip())}); {advice}")
    return done.stdout.strip().partition(";")[0]
