"""Writes the batch script of a command, and submits it to SLURM.

The script runs one task on each node by srun and knows nothing of a run's roles. One node runs `schedulers.job`. Each of several
nodes runs `cluster.bring_up`, which starts Ray, and the job on the first of them. The script's only other work is the end of the
time limit: SLURM signals the script alone, which passes the signal on to the job, so that the launcher ends its roles in order. The
job is queued again then, and whenever the command fails in a way that may pass.
"""

import secrets
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trivet.config.dump import to_toml
from trivet.config.layout import COMMITTED, RESULTS_FILE, RunLayout
from trivet.config.schema.deployment import SlurmCommand, SlurmConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.errors import ConfigError, SubmissionFailed
from trivet.process.lifetime import module_command
from trivet.schedulers.preparation import (
    FINAL_CODES,
    commit_time_s,
    count_gpus,
    count_machines,
    require_commits,
    show_notices,
    write_files,
)
from trivet.shown_text import shorten
from trivet.storage.durable import hash_bytes

_DIRECTIVES = ("job_name", "partition", "account", "qos", "constraint", "nodelist", "exclude", "time", "cpus_per_task", "mem")
"""Keys that sbatch takes by the same name, with dashes."""
_NOT_AGAIN = (0, *FINAL_CODES, 128 + signal.SIGINT)
"""Exit codes after which a job is not queued again: it is done, it would fail the same way, or a user interrupted it."""
_MAX_STARTS = 3
"""Starts in a row without progress after which a job is not queued again. One or two may be passing faults. Without a
limit, a job that cannot progress would be started for ever."""
_NO_PROGRESS: Mapping[SlurmCommand, str] = {
    "rl": "committed nothing",
    "sft": "committed nothing",
    "eval": "added no result",
}
"""The end of a message about starts without progress."""
_SBATCH_TIMEOUT_S = 60.0
"""sbatch waits several times its MessageTimeout, 10 s by default, for a controller that does not answer."""


AnyConfig = RLConfig | SftConfig | EvalConfig


def submit(config: AnyConfig, *, command: SlurmCommand, is_dry_run: bool) -> str:
    """Write the script of a configuration with a table [slurm], and submit it; return what was done.

    Args:
        is_dry_run: write only.

    Raises:
        ConfigError: the table and other keys do not fit together, or the script cannot be written.
        SubmissionFailed: sbatch refused the script, or there is none.
    """
    assert config.slurm is not None
    if config.slurm.cpus_per_task is None and not config.slurm.exclusive:
        show_notices(
            ["[slurm] sets neither cpus_per_task nor exclusive: with most clusters the job has one core for all roles"]
        )
    output_dir = _check(config, config.slurm)
    directory = RunLayout(output_dir).slurm
    text = to_toml(config.model_copy(update={"slurm": None}))
    # Another configuration has another file: a job that still waits reads its own.
    configuration = directory / f"{command}-{hash_bytes(text.encode()).xxh3_128[:8]}.toml"
    script = directory / f"{command}.sbatch"
    # The job's number alone would not do as its name: a controller that lost its state gives the same numbers again.
    made = make_script(config, command=command, configuration=configuration, submission=secrets.token_hex(4))
    write_files(directory, {configuration: text, script: made})
    if is_dry_run:
        return f"wrote {script}; submit it with: sbatch {shlex.quote(str(script))}"
    job_id = run_sbatch(script)
    return f"job {job_id} submitted; its log: {directory / f'{job_id}.log'}, its script: {script}"


def _check(config: AnyConfig, slurm: SlurmConfig) -> Path:
    """Refuse what does not fit together; return the absolute output directory."""
    if slurm.requeue:
        needed = commit_time_s(config)
        if slurm.signal_seconds < needed:
            raise ConfigError(
                f"slurm.signal_seconds ({slurm.signal_seconds}) is less than recovery.preemption_grace_s + shutdown_timeout_s "
                f"({needed:g}): the time limit would end the run before its commit; raise slurm.signal_seconds"
            )
        require_commits(config, restarted_by="slurm.requeue", otherwise=", or slurm.requeue = false")
    project = slurm.project_dir.absolute()
    if not project.is_dir():
        raise ConfigError(f"slurm.project_dir {str(project)!r} is not a directory; name the one that the job is to run in")
    if config.output_dir is None:
        raise ConfigError("[slurm] needs output_dir: the job's script and log are written there; set it")
    return project / config.output_dir


def make_script(config: AnyConfig, *, command: SlurmCommand, configuration: Path, submission: str) -> str:
    """Return the text of the batch script.

    Args:
        configuration: the file that the command reads, in the absolute directory of script and log.
        submission: an id of the submission.
    """
    slurm = config.slurm
    assert slurm is not None
    lines = [
        "#!/bin/bash",
        f"# Runs `{command}` as a job of SLURM. Written by the command itself, which overwrites it when it is started again.",
        *(f"#SBATCH {word}" for word in _directives(config, slurm, directory=configuration.parent)),
        "set -eo pipefail",
        f"cd -- {shlex.quote(str(slurm.project_dir.absolute()))}",
        f'directory={shlex.quote(str(configuration.parent))} name="$SLURM_JOB_ID-{submission}"',
        'pid_file="$directory/$name.pid" start="$name.${SLURM_RESTART_COUNT:-0}"',
        "# This script may have been submitted by hand before, as a job that had the same number.",
        'if [[ ${SLURM_RESTART_COUNT:-0} == 0 ]]; then rm -f -- "$directory/$name".*; fi',
        "export PYTHONUNBUFFERED=1  # srun's own --unbuffered gives the task a terminal, on which progress is drawn",
        'srun_pid="" num_signals=0',
        'rm -rf -- "$pid_file" "$directory/ray-$name".*  # of a start that its node did not survive',
        *(_count_starts(command, RunLayout(configuration.parent.parent)) if slurm.requeue else []),
        # Before the process id is written, the task as a whole is ended.
        "trap 'num_signals=$((num_signals + 1))",
        """  kill -TERM "$(cat "$pid_file" 2> /dev/null || echo "$srun_pid")" || true' TERM""",
        """trap 'rm -rf -- "$pid_file" "$directory/ray-$start"' EXIT""",
        *([slurm.pre_run_command] if slurm.pre_run_command else []),
        "set -u",
        f"srun {shlex.join([*_srun_words(config), *slurm.srun_args])} \\",
        f"  {_task(config, slurm, command=command, configuration=configuration)} &",
        "srun_pid=$!",
        "while true; do",
        "  before=$num_signals code=0",
        '  wait "$srun_pid" || code=$?',
        "  # A signal ends the wait, not the task.",
        '  if [[ $num_signals == "$before" ]]; then break; fi',
        "done",
        "trap '' TERM",
    ]
    if isinstance(config, RLConfig) and config.deployment.is_multi_node:
        lines += [
            "# srun reports the highest code of all nodes: one that SLURM killed would hide how the run ended.",
            'if [[ -s $directory/$start.code ]]; then code=$(< "$directory/$start.code"); fi',
        ]
    if slurm.requeue:
        lines += [
            "# The time is up, a node was lost, or the command failed. A job that was cancelled is not running any more.",
            f"if [[ ! $code =~ ^({'|'.join(map(str, _NOT_AGAIN))})$ ]]; then",
            '  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) || state="unknown to squeue"',
            "  if [[ $state == CANCELLED || $state == COMPLETING ]]; then",
            '    echo "not queued again: the job is $state"',
            f"  elif [[ $(num_starts) -ge {_MAX_STARTS} ]]; then",
            f'    echo "not queued again: {_MAX_STARTS} starts in a row {_NO_PROGRESS[command]};"',
            '    echo "see why each of them ended, or raise slurm.time, and submit the script again"',
            "  else",
            '    scontrol requeue "$SLURM_JOB_ID" || echo "not queued again: scontrol failed; submit the script again to go on"',
            "  fi",
            "fi",
        ]
    return "\n".join([*lines, 'exit "$code"', ""])


def _srun_words(config: AnyConfig) -> list[str]:
    num_nodes = count_machines(config)
    # The launcher on the first node decides what the end of another node means, so srun ends no task for it. sbatch's --no-kill
    # keeps the job, not its step.
    several = ["--kill-on-bad-exit=0", "--wait=0", "--no-kill"] if num_nodes > 1 else []
    return [f"--nodes={num_nodes}", f"--ntasks={num_nodes}", *several, "--cpu-bind=none", "--export=ALL"]


def _task(config: AnyConfig, slurm: SlurmConfig, *, command: SlurmCommand, configuration: Path) -> str:
    """Return the shell's words for what srun runs on each node."""
    task = shlex.join(module_command("trivet.schedulers.job", command, str(configuration))) + ' --pid-file "$pid_file"'
    if not isinstance(config, RLConfig) or not config.deployment.is_multi_node:
        return task
    gpus, lost_after_s = count_gpus(config, asked=slurm.gpus_per_node), f"{config.deployment.lost_after_s:g}"
    words = shlex.join(module_command("trivet.cluster.bring_up", "--gpus", str(gpus), "--lost-after-s", lost_after_s))
    words += ' --directory "$directory" --job "$start"'
    if count_machines(config) > 1:  # the job may lose the node of this script
        action = "scontrol requeue" if slurm.requeue else "scancel"
        words += f' --script-host "${{SLURMD_NODENAME:-}}" --script-lost "{action}"'
    return f"{words} -- {task}"


def _count_starts(command: SlurmCommand, layout: RunLayout) -> list[str]:
    """Return lines that note the progress at each start. `num_starts` counts the starts that began with the present progress."""
    if command == "eval":  # results are appended as examples finish
        directory, progress = layout.evals, f"-name {RESULTS_FILE} -printf '%s %p\\n' 2> /dev/null | sort | cksum"
    else:
        directory, progress = layout.checkpoints, f"-maxdepth 2 -name {COMMITTED} 2> /dev/null | sort -V | tail -n 1"
    return [
        f'progress() {{ echo "at $(find {shlex.quote(str(directory))} {progress} || true)"; }}',
        'num_starts() { grep -cFx -- "$(progress)" "$directory/$name.starts" 2> /dev/null || true; }',
        'progress >> "$directory/$name.starts" || true',
    ]


def _directives(config: AnyConfig, slurm: SlurmConfig, *, directory: Path) -> Iterator[str]:
    for name in _DIRECTIVES:
        if (value := getattr(slurm, name)) is not None:
            yield f"--{name.replace('_', '-')}={shlex.quote(str(value))}"
    yield f"--nodes={count_machines(config)}"
    yield "--ntasks-per-node=1"
    if num_gpus := count_gpus(config, asked=slurm.gpus_per_node):
        yield f"--gres=gpu:{num_gpus}"
    if slurm.exclusive:
        yield "--exclusive"
    yield f"--output={shlex.quote(str(directory).replace('%', '%%'))}/%j.log"
    yield "--open-mode=append"
    yield "--requeue" if slurm.requeue else "--no-requeue"
    if count_machines(config) > 1:
        yield "--no-kill"
    yield f"--signal=B:TERM@{slurm.signal_seconds}"
    yield from slurm.sbatch_args


def run_sbatch(script: Path, *, program: Sequence[str] = ("sbatch",)) -> str:
    """Submit a script; return the job's id.

    Raises:
        SubmissionFailed: sbatch is not installed, does not answer or refuses.
    """
    advice = (
        f"the script is {script}: submit it where sbatch is, or change the keys that it refuses and start the command again"
    )
    try:
        done = subprocess.run(
            [*program, "--parsable", str(script)], capture_output=True, text=True, timeout=_SBATCH_TIMEOUT_S, check=False
        )
    except FileNotFoundError as exc:
        raise SubmissionFailed(f"[slurm] is set, but this machine has no sbatch; {advice}") from exc
    except subprocess.TimeoutExpired as exc:
        raise SubmissionFailed(
            f"sbatch did not answer within {_SBATCH_TIMEOUT_S:g} s; ask squeue whether it has the job all the same; {advice}"
        ) from exc
    if done.returncode:
        raise SubmissionFailed(f"sbatch refused the job ({shorten(done.stderr.strip())}); {advice}")
    return done.stdout.strip().partition(";")[0]
