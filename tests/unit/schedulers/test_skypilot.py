import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from trivet.config.load import load_config
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.errors import ConfigError
from trivet.schedulers.skypilot import make_task
from trivet.schedulers.submit import submit

NEEDED = ["--skypilot.working-dir", "/runs/me", "--output-dir", "run-1"]
RL = ["--orchestrator.rollouts-per-example", "4", "--orchestrator.env.id", "x", *NEEDED]
H100 = ["--skypilot.accelerator", "H100"]
NODES = ["--deployment.type", "multi_node", "--deployment.num-train-nodes", "2", "--deployment.num-infer-replicas", "3"]


def task(*flags: str) -> dict[str, Any]:
    config = load_config(RLConfig, [*RL, *flags]).config
    return make_task(config, command="rl", configuration=Path("/here/rl.toml"))


def test_a_task_has_the_nodes_and_the_gpus_of_the_run():
    assert (task(*H100)["num_nodes"], task(*H100)["resources"]["accelerators"]) == (1, "H100:2")
    assert (task(*H100, *NODES)["num_nodes"], task(*H100, *NODES)["resources"]["accelerators"]) == (5, "H100:8")
    resources = task("--skypilot.gpus-per-node", "0", "--skypilot.image", "r/t:1")["resources"]
    assert resources == {"image_id": "docker:r/t:1", "job_recovery": {"recover_on_exit_codes": [75]}}


def run_here(directory: Path, *flags: str, **variables: str) -> list[str]:
    """Run the script of a task on this machine, with a stand-in for python; return what it was asked."""
    made = task(
        *H100, "--skypilot.python", str(directory / "python"), "--skypilot.working-dir", f"{directory}/it's shared", *flags
    )
    assert made["file_mounts"] == {"~/.trivet/trivet/rl.toml": "/here/rl.toml"}
    (directory / "it's shared").mkdir(exist_ok=True)
    (directory / "python").write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n')
    (directory / "python").chmod(0o755)
    environ = os.environ | {"HOME": "/home/me", "SKYPILOT_TASK_ID": "sky-1_trivet", **variables}
    done = subprocess.run(["bash", "-c", made["run"]], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == f"{directory}/it's shared"
    return done.stdout.splitlines()[1:]


JOB = [
    *("-P", "-m", "trivet.schedulers.job", "rl", "/home/me/.trivet/trivet/rl.toml"),
    *("--pid-file", "run-1/skypilot/sky-1_trivet.pid"),
]


def test_a_node_gets_the_configuration_and_runs_it_in_the_shared_directory(tmp_path: Path):
    assert run_here(tmp_path) == JOB


def test_each_of_several_nodes_starts_ray_under_a_name_that_all_know_and_no_other_start_has(tmp_path: Path):
    def words(rank: int, addresses: str) -> list[str]:
        return run_here(tmp_path, *NODES, SKYPILOT_NODE_RANK=str(rank), SKYPILOT_NODE_IPS=addresses)

    first, other = (words(rank, "10.0.0.1\n10.0.0.2") for rank in (0, 1))
    name = first[first.index("--job") + 1]
    assert first[:3] == ["-P", "-m", "trivet.cluster.bring_up"]
    assert first[3:9] == ["--directory", "run-1/skypilot", "--gpus", "8", "--lost-after-s", "30"]
    assert first[9:] == ["--job", name, "--index", "0", "--", str(tmp_path / "python"), *JOB]
    assert other == [*first[:12], "1", *first[13:]]
    assert name.startswith("sky-1_trivet-")
    assert name not in words(0, "10.0.0.1\n10.0.0.3")


def test_secrets_are_named_and_overrides_come_last():
    made = task(
        *H100,
        *("--skypilot.secrets", "WANDB_API_KEY", "--skypilot.env.A", "b"),
        *("--skypilot.task-overrides", '{"file_mounts": {"/m": "s3://models"}, "resources": {"use_spot": true, "cpus": "8+"}}'),
    )
    assert (made["secrets"], made["envs"]) == ({"WANDB_API_KEY": None}, {"A": "b"})
    assert set(made["file_mounts"]) == {"/m", "~/.trivet/trivet/rl.toml"}
    assert (made["resources"]["use_spot"], made["resources"]["cpus"]) == (True, "8+")
    assert made["resources"]["accelerators"] == "H100:2"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], r"skypilot.accelerator must say of which kind the 2 GPUs"),
        ([*H100, "--output-dir", "/elsewhere"], r"'/elsewhere' .* not below skypilot.working_dir \('/runs/me'\)"),
        (
            [*H100, "--skypilot.task-overrides", '{"envs": {"A_TOKEN": "x"}}'],
            r"skypilot.task_overrides gives A_TOKEN a value.*skypilot.secrets",
        ),
        ([*H100, "--inference.server.api-key", "hidden"], r"inference.server.api_key may hold a secret.*skypilot.secrets"),
        (
            [*H100, "--kubernetes.image", "i", "--kubernetes.volume-claim", "c"],
            r"\[kubernetes\] and \[skypilot\] name two schedulers",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch, flags: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        submit(load_config(RLConfig, [*RL, *flags]), command="rl", is_dry_run=True)
    assert list(tmp_path.iterdir()) == []


def test_a_variable_that_may_be_secret_is_refused():
    with pytest.raises(ConfigError, match=r'HF_TOKEN in env may be secret.*secrets = \["HF_TOKEN"\]'):
        load_config(RLConfig, [*RL, "--skypilot.env.HF_TOKEN", "x"])


def test_the_command_writes_the_task_and_says_how_to_start_it(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = [*NEEDED, "--device", "cpu", "--ckpt.interval", "5", "--skypilot.secrets", "WANDB_API_KEY"]
    assert submit(load_config(SftConfig, flags), command="sft", is_dry_run=False) == 0
    file = tmp_path / "run-1" / "skypilot" / "task.yaml"
    said = f"wrote {file}; start it with: sky jobs launch --secret WANDB_API_KEY {file}\n"
    assert capsys.readouterr().out == said
    made = yaml.safe_load(file.read_text())
    (configuration,) = made["file_mounts"].values()
    in_job = load_config(SftConfig, ["@", configuration]).config
    assert in_job == load_config(SftConfig, flags).config.model_copy(update={"skypilot": None})
