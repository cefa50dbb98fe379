import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from support.processes import wait_until
from trivet.config.load import load_config
from trivet.config.schema.deployment import SlurmCommand, SlurmConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.errors import ConfigError, SubmissionFailed
from trivet.launcher.commands import rl
from trivet.schedulers.preparation import count_gpus, count_machines
from trivet.schedulers.slurm import make_script, run_sbatch
from trivet.schedulers.submit import submit

RUN = """
output_dir = "{directory}"
max_steps = 3
[model]
name = "Qwen/Qwen3-0.6B"
[orchestrator]
rollouts_per_example = 4
[[orchestrator.env]]
id = "reverse-text"
[slurm]
partition = "gpu"
"""


def make(directory: Path, *, num_nodes: int = 1, command: SlurmCommand = "rl", **keys: object) -> str:
    """Return the batch script of a command whose table [slurm] has these keys."""
    if command == "eval":
        kind, flags = EvalConfig, ["--env.id", "x"]
    else:
        kind, flags = RLConfig, ["--orchestrator.rollouts-per-example", "4", "--orchestrator.env.id", "x"]
        nodes = ["--deployment.type", "multi_node", "--deployment.gpus-per-node", "2"]
        flags += [*nodes, "--deployment.num-infer-replicas", str(num_nodes - 1)] if num_nodes > 1 else []
    config = load_config(kind, flags).config.model_copy(update={"slurm": SlurmConfig.model_validate(keys)})
    return make_script(config, command=command, configuration=directory / "rl-1f0c.toml", submission="1f")


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


def run_file(directory: Path, more: str = "") -> Path:
    file = directory / "run.toml"
    file.write_text(RUN.format(directory=directory / "run") + more)
    return file


def stand_in(directory: Path, text: str) -> str:
    """Return a program that plays sbatch."""
    program = directory / "sbatch"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


def test_the_directives_are_those_of_the_table(tmp_path):
    keys = {
        "job_name": "my run",
        "time": "4:00:00",
        "exclusive": True,
        "sbatch_args": ["--mail-type=END"],
        "signal_seconds": 90,
    }
    found = directives(make(tmp_path, **keys))
    assert found == [
        "--job-name='my run'",
        "--time=4:00:00",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--gres=gpu:2",
        "--exclusive",
        f"--output={tmp_path}/%j.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:TERM@90",
        "--mail-type=END",
    ]


def test_a_job_of_several_nodes_outlives_one_of_them(tmp_path):
    script = make(tmp_path, num_nodes=3)
    assert "--no-kill" in directives(script)
    assert "bring_up --gpus 2 --lost-after-s 30 " in script
    assert '--script-host "${SLURMD_NODENAME:-}" --script-lost "scontrol requeue" -- ' in script
    assert '--script-lost "scancel"' in make(tmp_path, num_nodes=3, requeue=False)
    assert "--no-kill" not in make(tmp_path)
    assert "--script-host" not in make(tmp_path)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"num_nodes": 4},
        {"requeue": False},
        {"pre_run_command": "module load cuda", "srun_args": ["--mpi=none", "a b"]},
    ],
)
@pytest.mark.parametrize("command", ["rl", "eval"])
def test_a_script_is_clean_for_bash_and_shellcheck(tmp_path, keys, command):
    script = tmp_path / "rl.sbatch"
    script.write_text(make(tmp_path / "with spaces", command=command, **keys))
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)


def test_names_in_a_path_are_no_part_of_the_script(tmp_path):
    script = tmp_path / "rl.sbatch"
    text = make(tmp_path / "it's $(touch here) 100%", project_dir=tmp_path)
    assert "--output='" in text
    assert "100%%'/%j.log" in text
    script.write_text(text.replace("srun ", "echo ").replace("squeue", "true"))
    subprocess.run(["bash", script], check=True, env=os.environ | {"SLURM_JOB_ID": "1"}, stdout=subprocess.DEVNULL)
    assert not (tmp_path / "here").exists()


def test_a_job_that_is_not_to_be_queued_again_asks_for_nothing(tmp_path):
    script = make(tmp_path, requeue=False)
    assert "--no-requeue" in directives(script)
    assert "scontrol" not in script


def test_a_value_of_two_lines_is_refused():
    with pytest.raises(ValueError, match="partition"):
        SlurmConfig(partition="gpu\n#SBATCH --account=other")


@pytest.mark.parametrize(
    ("kind", "flags", "count"),
    [
        (RLConfig, [], 2),
        (RLConfig, ["--inference-gpu-ids", "0,1", "--trainer-gpu-ids", "2,3"], 4),
        (RLConfig, ["--inference-gpu-ids", "0", "--trainer-gpu-ids", "0"], 1),
        (RLConfig, ["--slurm.gpus-per-node", "0"], 0),
        (RLConfig, ["--deployment.type", "multi_node", "--deployment.gpus-per-node", "4"], 4),
        (SftConfig, ["--num-ranks", "4"], 4),
        (SftConfig, ["--device", "cpu"], 0),
        (EvalConfig, ["--env.id", "reverse-text"], 0),
    ],
)
def test_a_job_asks_for_the_gpus_that_the_configuration_names(kind, flags, count):
    needed = ["--orchestrator.rollouts-per-example", "4", "--orchestrator.env.id", "x"] if kind is RLConfig else []
    config = load_config(kind, [*needed, "--slurm.job-name", "x", *flags]).config
    assert config.slurm is not None
    assert count_gpus(config, asked=config.slurm.gpus_per_node) == count


def test_a_dry_run_writes_script_and_configuration_and_submits_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(Path(stand_in(tmp_path, "exit 9")).parent) + os.pathsep + os.environ["PATH"])
    file = run_file(tmp_path)
    monkeypatch.setattr("sys.argv", ["rl", "@", str(file), "--dry-run"])
    assert rl.main() == 0
    directory = tmp_path / "run" / "slurm"
    assert f"sbatch {directory / 'rl.sbatch'}" in capsys.readouterr().out
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    (resolved,) = directory.glob("rl-*.toml")
    assert str(resolved) in (directory / "rl.sbatch").read_text()
    submitted = load_config(RLConfig, ["@", str(resolved)]).config
    meant = load_config(RLConfig, ["@", str(file)]).config
    assert submitted == meant.model_copy(update={"slurm": None})


def test_a_job_has_a_machine_for_each_node_and_servers_share_one_as_they_find_room():
    flags = ["--orchestrator.rollouts-per-example", "4", "--orchestrator.env.id", "x", "--deployment.type", "multi_node"]
    flags += ["--deployment.num-train-nodes", "2", "--deployment.num-infer-replicas", "3", "--deployment.num-env-nodes", "1"]
    assert count_machines(load_config(RLConfig, flags).config) == 2 + 3 + 1
    shared = load_config(RLConfig, [*flags, "--deployment.servers-per-node", "2", "--deployment.max-env-nodes", "4"]).config
    assert count_machines(shared) == 2 + 2 + 4


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("missing", "no sbatch"),
        ("echo 'Invalid partition' >&2; exit 1", "Invalid partition"),
        ("exec sleep 60", "did not answer"),
    ],
)
def test_what_sbatch_does_not_take_is_one_clear_error(tmp_path, monkeypatch, program, message):
    monkeypatch.setattr("trivet.schedulers.slurm._SBATCH_TIMEOUT_S", 0.5)
    words = [str(tmp_path / "none")] if program == "missing" else [stand_in(tmp_path, program)]
    with pytest.raises(SubmissionFailed, match=message):
        run_sbatch(tmp_path / "rl.sbatch", program=words)


def test_a_signal_that_comes_too_late_for_a_commit_is_refused(tmp_path):
    loaded = load_config(RLConfig, ["@", str(run_file(tmp_path, "signal_seconds = 60\n"))])
    with pytest.raises(ConfigError, match=r"slurm.signal_seconds \(60\).*raise slurm.signal_seconds"):
        submit(loaded, command="rl", is_dry_run=True)


def test_fine_tuning_that_would_begin_anew_each_time_is_refused(tmp_path):
    flags = ["--output-dir", str(tmp_path), "--slurm.job-name", "x"]
    with pytest.raises(ConfigError, match=r"ckpt.interval"):
        submit(load_config(SftConfig, flags), command="sft", is_dry_run=True)
    assert submit(load_config(SftConfig, [*flags, "--ckpt.interval", "10"]), command="sft", is_dry_run=True) == 0
    assert submit(load_config(SftConfig, [*flags, "--no-slurm.requeue"]), command="sft", is_dry_run=True) == 0


def test_another_configuration_does_not_change_what_a_waiting_job_reads(tmp_path):
    for steps in ("3", "4"):
        loaded = load_config(RLConfig, ["@", str(run_file(tmp_path)), "--max-steps", steps])
        submit(loaded, command="rl", is_dry_run=True)
    assert len(list((tmp_path / "run" / "slurm").glob("rl-*.toml"))) == 2


def test_a_project_directory_that_is_not_there_is_refused(tmp_path):
    loaded = load_config(RLConfig, ["@", str(run_file(tmp_path, 'project_dir = "none"\n'))])
    with pytest.raises(ConfigError, match=r"slurm.project_dir.*none.*is not a directory"):
        submit(loaded, command="rl", is_dry_run=True)


def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "run").write_text("a file")
    loaded = load_config(RLConfig, ["@", str(run_file(tmp_path))])
    with pytest.raises(ConfigError, match="cannot be written"):
        submit(loaded, command="rl", is_dry_run=True)


def test_an_evaluation_needs_a_directory_for_its_script():
    loaded = load_config(EvalConfig, ["--env.id", "x", "--slurm.job-name", "x"])
    with pytest.raises(ConfigError, match="output_dir"):
        submit(loaded, command="eval", is_dry_run=True)


SRUN = """
while [[ $1 != --pid-file ]]; do shift; done
trap 'echo TERM; {after}; exit {code}' TERM
echo $$ > "$2"
touch {ready}
for i in $(seq {turns}); do sleep 0.05; done
"""
COMMITS = "mkdir -p {directory}/checkpoints/step_4; touch {directory}/checkpoints/step_4/COMMITTED"


def run_script(
    directory: Path,
    *,
    code: int,
    after: str = "true",
    state: str = "RUNNING",
    squeue: str = "",
    num_nodes: int = 1,
    restarts: int = 0,
    command: SlurmCommand = "rl",
    is_signalled: bool = True,
) -> tuple[int, str, str]:
    """Run a job's script with stand-ins for SLURM's commands, and signal it when its task runs.

    Args:
        restarts: how often the job was queued again before.
        is_signalled: SLURM signals the script. Otherwise the task ends by itself.

    Returns:
        Its exit code, what scontrol was asked, and what was written to the log.
    """
    programs, asked, ready = directory / "programs", directory / "asked", directory / "ready"
    programs.mkdir(exist_ok=True)
    for path in (asked, ready):
        path.unlink(missing_ok=True)
    texts = {
        "srun": SRUN.format(code=code, after=after, ready=ready, turns=200 if is_signalled else 0) + "kill -TERM $$",
        "squeue": squeue or f"echo {state}",
        "scontrol": f'echo "$@" >> {asked}',
    }
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    (directory / "slurm").mkdir(exist_ok=True)
    script = directory / "slurm" / "rl.sbatch"
    script.write_text(make(directory / "slurm", num_nodes=num_nodes, command=command, project_dir=directory))
    environ = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    environ |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    with subprocess.Popen(
        ["bash", script], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        wait_until(ready.exists, timeout_s=20, waiting_for="the task")
        if is_signalled:
            running.terminate()
        said, _ = running.communicate(timeout=30)
    assert not list(directory.glob("slurm/*.pid"))
    return running.returncode, asked.read_text().strip() if asked.exists() else "", said


def test_a_job_of_another_submission_has_other_files_whatever_its_number(tmp_path):
    """A controller that lost its state counts from 1 again. The notes of the first job must not reach the second."""
    found: set[str] = set()
    for _ in range(2):
        submit(load_config(RLConfig, ["@", str(run_file(tmp_path))]), command="rl", is_dry_run=True)
        script = (tmp_path / "run" / "slurm" / "rl.sbatch").read_text()
        found |= {line for line in script.splitlines() if line.startswith("directory=")}
    assert len(found) == 2


def test_a_script_that_is_submitted_again_by_hand_forgets_what_its_last_job_noted(tmp_path):
    (tmp_path / "slurm").mkdir()
    note, other = tmp_path / "slurm" / "17-1f.before.json", tmp_path / "slurm" / "17-2e.before.json"
    for path in (note, other):
        path.touch()
    run_script(tmp_path, code=0, restarts=1)
    assert note.exists()
    run_script(tmp_path, code=0)
    assert not note.exists()
    assert other.exists()


@pytest.mark.parametrize("code", [1, 75, 137, 143])
def test_a_job_that_fails_in_a_way_that_may_pass_is_queued_again(tmp_path, code):
    assert run_script(tmp_path, code=code, is_signalled=False)[:2] == (code, "requeue 17")


@pytest.mark.parametrize("code", [0, 2, 3, 130])
def test_a_job_that_is_done_refused_diverged_or_interrupted_is_not_queued_again(tmp_path, code):
    assert run_script(tmp_path, code=code, after=COMMITS.format(directory=tmp_path))[:2] == (code, "")


def test_a_job_is_not_queued_again_after_three_starts_in_a_row_without_a_commit(tmp_path):
    found = [run_script(tmp_path, code=143, restarts=restarts) for restarts in range(3)]
    assert [asked for _, asked, _ in found] == ["requeue 17", "requeue 17", ""]
    assert "3 starts in a row committed nothing" in found[-1][2]
    assert "raise slurm.time" in found[-1][2]


def test_faults_before_the_next_commit_do_not_end_a_job_that_goes_on_committing(tmp_path):
    step = "mkdir -p {directory}/checkpoints/step_{step}; touch {directory}/checkpoints/step_{step}/COMMITTED"
    commits = {restarts: step.format(directory=tmp_path, step=restarts + 1) for restarts in (0, 3)}
    found = [run_script(tmp_path, code=143, restarts=restarts, after=commits.get(restarts, "true")) for restarts in range(7)]
    assert [asked for _, asked, _ in found] == ["requeue 17"] * 6 + [""]


def test_an_evaluation_is_not_queued_again_after_three_starts_without_a_new_result(tmp_path):
    results = tmp_path / "evals" / "step_0" / "x" / "results.jsonl"
    results.parent.mkdir(parents=True)
    found: list[str] = []
    for restarts, after in enumerate([f"echo one >> {results}", "true", "true", "true"]):
        found.append(run_script(tmp_path, code=143, restarts=restarts, after=after, command="eval")[1])
    assert found == ["requeue 17"] * 3 + [""]


def test_a_job_that_was_cancelled_is_not_queued_again(tmp_path):
    _, asked, said = run_script(tmp_path, code=143, after=COMMITS.format(directory=tmp_path), state="COMPLETING")
    assert asked == ""
    assert "not queued again: the job is COMPLETING" in said


def test_a_controller_that_does_not_answer_does_not_cost_the_requeue(tmp_path):
    _, asked, _ = run_script(tmp_path, code=143, after=COMMITS.format(directory=tmp_path), squeue="exit 1")
    assert asked == "requeue 17"


@pytest.mark.parametrize(
    ("noted", "reported", "asked"),
    [
        pytest.param("3", 137, "", id="a node was killed by SLURM after the run had diverged"),
        pytest.param("0", 1, "", id="a node failed after the run was done"),
        pytest.param("75", 143, "requeue 17", id="the run needs a node that was lost"),
        pytest.param("", 137, "requeue 17", id="the first node noted nothing"),
    ],
)
def test_the_exit_code_of_a_job_is_that_of_its_first_node(tmp_path: Path, noted: str, reported: int, asked: str) -> None:
    note = f'printf "{noted}" > {tmp_path}/slurm/17-1f.0.code'
    after = "; ".join([COMMITS.format(directory=tmp_path), note])
    code, found, _ = run_script(tmp_path, code=reported, after=after, num_nodes=2)
    assert (code, found) == (int(noted or reported), asked)


def test_the_secrets_of_a_start_go_with_the_job_whose_first_node_was_lost(tmp_path: Path) -> None:
    kept = tmp_path / "slurm" / "ray-17-2e.0"
    for directory in (kept, tmp_path / "slurm" / "ray-17-1f.0"):
        directory.mkdir(parents=True)
    run_script(tmp_path, code=0, num_nodes=2, restarts=1, after=f"mkdir {tmp_path}/slurm/ray-17-1f.1")
    assert list(tmp_path.glob("slurm/ray-*")) == [kept]
