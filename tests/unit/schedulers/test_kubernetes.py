import json
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from trivet.cli import main as cli
from trivet.config.load import load_config
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.errors import ConfigError
from trivet.launcher.commands import rl
from trivet.schedulers.documents import to_yaml
from trivet.schedulers.kubernetes import make_manifest
from trivet.schedulers.submit import submit

NEEDED = ["--kubernetes.image", "registry.example/trivet:1", "--kubernetes.volume-claim", "runs", "--output-dir", "run-1"]
RL = ["--orchestrator.rollouts-per-example", "4", "--orchestrator.env.id", "x", *NEEDED]
NODES = ["--deployment.type", "multi_node", "--deployment.num-train-nodes", "2", "--deployment.num-infer-replicas", "3"]
FINAL = {"action": "FailJob", "onExitCodes": {"containerName": "trivet", "operator": "In", "values": [2, 3]}}
FILE = """
output_dir = "run-1"
[orchestrator]
rollouts_per_example = 4
[[orchestrator.env]]
id = "x"
[kubernetes]
image = "registry.example/trivet:1"
volume_claim = "runs"
"""


def manifest(*flags: str) -> dict[str, Any]:
    """Return the Job or RayJob of a run, as kubectl reads it."""
    config = load_config(RLConfig, [*RL, *flags]).config
    _, found = yaml.safe_load_all(to_yaml(make_manifest(config, command="rl", configuration="a = 1\n")))
    return found


def test_each_configuration_has_a_name_of_its_own_and_does_not_change():
    config = load_config(RLConfig, RL).config
    first, other = (make_manifest(config, command="rl", configuration=text)[0] for text in ("a = 1\n", "a = 2\n"))
    assert first["immutable"]
    assert first["metadata"]["name"] != other["metadata"]["name"]


def pod(found: dict[str, Any]) -> dict[str, Any]:
    return found["spec"]["template"]["spec"]


def variables(found: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod(found)["containers"]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def test_a_run_on_one_node_is_a_job_that_fails_for_what_is_final():
    found = manifest("--kubernetes.name", "my-run", "--kubernetes.max-restarts", "7")
    assert (found["apiVersion"], found["kind"], found["spec"]["backoffLimit"]) == ("batch/v1", "Job", 7)
    assert found["spec"]["podFailurePolicy"]["rules"] == [FINAL]
    assert pod(found)["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 2}


def test_a_pod_has_the_time_for_its_commit():
    found = manifest("--recovery.preemption-grace-s", "100.5", "--shutdown-timeout-s", "10")
    assert pod(found)["terminationGracePeriodSeconds"] == 111 + 30


@pytest.mark.parametrize("value", ["1", "y", "a: b", "$(HOME)", "two\nlines"])
def test_a_variable_has_the_value_that_was_written(value: str):
    found = manifest("--kubernetes.env", json.dumps({"A": value}))
    assert variables(found)["A"] == value.replace("$", "$$")  # which the kubelet turns back


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kubernetes.env.HF_TOKEN", "x"], r"HF_TOKEN in env may be secret.*secret_env"),
        (["--kubernetes.env.A", "x", "--kubernetes.secret-env.A", "s/k"], "A: in env and among the secrets"),
        (["--kubernetes.secret-env.A", "no-slash"], "secret_env"),
        (["--kubernetes.name", "Big"], "name"),
        (["--kubernetes.name", "1st"], "name"),
        (["--kubernetes.name", "a" * 41], "name"),
        (["--kubernetes.volume-path", "runs"], "absolute"),
        (["--kubernetes.memory", "lots"], "memory"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(flags: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(RLConfig, [*RL, *flags])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--output-dir", "/elsewhere"],
            r"output_dir is '/elsewhere' on the machines of the job, and not below kubernetes.volume_path",
        ),
        (["--output-dir", "../up"], "not below"),
        (["--kubernetes.working-dir", "/opt"], "'/opt/run-1'"),
        (
            ["--kubernetes.pod-overrides", '{"containers": [{"name": "trivet", "env": [{"name": "A_TOKEN", "value": "x"}]}]}'],
            r"kubernetes.pod_overrides gives A_TOKEN a value.*kubernetes.secret_env",
        ),
        (["--inference.server.api-key", "hidden"], r"inference.server.api_key may hold a secret.*kubernetes.secret_env"),
        (["--slurm.job-name", "x"], r"\[slurm\] and \[kubernetes\]"),
    ],
)
def test_what_would_be_lost_or_shown_is_refused(tmp_path: Path, monkeypatch, flags: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        submit(load_config(RLConfig, [*RL, *flags]), command="rl", is_dry_run=True)
    assert list(tmp_path.iterdir()) == []


def test_fine_tuning_needs_commits_to_be_started_again(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"kubernetes.max_restarts needs ckpt.interval"):
        submit(load_config(SftConfig, NEEDED), command="sft", is_dry_run=False)
    for flags in (["--ckpt.interval", "10"], ["--kubernetes.max-restarts", "0"]):
        assert submit(load_config(SftConfig, [*NEEDED, *flags]), command="sft", is_dry_run=False) == 0
    assert "trivet.schedulers.job" in (tmp_path / "run-1" / "kubernetes" / "job.yaml").read_text()


def test_an_override_is_merged_by_key_and_by_name():
    overrides = """{"priorityClassName": "high", "containers": [
        {"name": "trivet", "securityContext": {"runAsUser": 7}, "command": ["sleep", "1"],
         "resources": {"limits": {"rdma/ib": 1}}, "volumeMounts": [{"name": "runs", "mountPath": "/models"}],
         "env": [{"name": "JOB_UID", "value": "9"}, {"name": "B", "value": "2"}]},
        {"name": "watcher", "image": "w"}], "volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}]}"""
    found = manifest("--kubernetes.pod-overrides", overrides.replace("\n", ""))
    own, other = pod(found)["containers"]
    assert (pod(found)["priorityClassName"], own["securityContext"], own["command"]) == (
        "high",
        {"runAsUser": 7},
        ["sleep", "1"],
    )
    assert own["resources"]["limits"] == {"nvidia.com/gpu": 2, "rdma/ib": 1}
    assert {each["mountPath"] for each in own["volumeMounts"]} == {"/run/trivet", "/runs", "/dev/shm", "/models"}
    assert (variables_of(own)["JOB_UID"], variables_of(own)["B"]) == ("9", "2")
    assert other == {"name": "watcher", "image": "w"}
    assert pod(found)["volumes"][-1] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}


def variables_of(container: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container["env"]}


def test_the_command_writes_the_manifest_and_says_how_to_apply_it(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(FILE)
    monkeypatch.setattr("sys.argv", ["rl", "@", "run.toml"])
    assert rl.main() == 0
    directory = Path("run-1/kubernetes")
    assert capsys.readouterr().out == f"wrote {directory}/job.yaml; start it with: kubectl apply -f {directory}/job.yaml\n"
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {
        "job.yaml": 0o600,
        "rl.toml": 0o600,
    }
    config_map, found = yaml.safe_load_all((directory / "job.yaml").read_text())
    assert config_map["data"]["rl.toml"] == (directory / "rl.toml").read_text()
    assert pod(found)["volumes"][0]["configMap"]["name"] == config_map["metadata"]["name"]
    in_pod = load_config(RLConfig, ["@", str(directory / "rl.toml")]).config
    assert in_pod == load_config(RLConfig, ["@", "run.toml"]).config.model_copy(update={"kubernetes": None})


def test_the_nodes_of_a_run_are_pods_of_worker_groups():
    flags = ["--deployment.max-infer-replicas", "4", "--deployment.num-env-nodes", "1", "--deployment.max-env-nodes", "9"]
    found = manifest(*NODES, *flags, "--deployment.env-resources", '{"sandbox": 1}', "--kubernetes.max-restarts", "7")
    spec, cluster = found["spec"], found["spec"]["rayClusterSpec"]
    assert (found["kind"], spec["backoffLimit"], spec["shutdownAfterJobFinishes"]) == ("RayJob", 7, True)
    assert (cluster["authOptions"], cluster["enableInTreeAutoscaling"]) == ({"mode": "token"}, True)
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    counts = {name: (each["replicas"], each["minReplicas"], each["maxReplicas"]) for name, each in groups.items()}
    assert counts == {"train": (2, 2, 2), "infer": (3, 3, 4), "env": (1, 1, 9)}
    limits = {name: each["template"]["spec"]["containers"][0]["resources"]["limits"] for name, each in groups.items()}
    assert limits == {"train": {"nvidia.com/gpu": 8}, "infer": {"nvidia.com/gpu": 8}, "env": {"cpu": 8}}
    assert groups["train"]["rayStartParams"] == {"num-cpus": "1", "num-gpus": "8"}
    assert groups["env"]["rayStartParams"] == {"num-cpus": "8", "num-gpus": "0", "resources": "'{\"sandbox\": 1.0}'"}
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}


def test_the_driver_runs_in_the_shared_directory_and_has_the_time_for_its_commit():
    spec = manifest(*NODES, "--kubernetes.working-dir", "/runs/me")["spec"]
    words = spec["entrypoint"].split()
    assert words[:9] == ["env", "-C", "/runs/me", "python", "-P", "-m", "trivet.schedulers.job", "rl", "/run/trivet/rl.toml"]
    assert words[9] == "--pid-file"
    assert words[10].startswith("/runs/me/run-1/kubernetes/trivet-")
    assert "enableInTreeAutoscaling" not in spec["rayClusterSpec"]
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (container,) = head["containers"]
    assert "command" not in container
    assert variables_of(container)["RAY_JOB_STOP_WAIT_TIME_S"] == str(head["terminationGracePeriodSeconds"])
    assert f"$(cat {words[10]})" in container["lifecycle"]["preStop"]["exec"]["command"][2]
    for group in spec["rayClusterSpec"]["workerGroupSpecs"]:
        assert "lifecycle" not in group["template"]["spec"]["containers"][0]


def test_pods_offer_the_cpus_that_the_nodes_of_a_run_ask_for():
    def groups(*flags: str) -> dict[str, tuple[int, str]]:
        found = manifest(*NODES, *flags)["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        return {group["groupName"]: (group["replicas"], group["rayStartParams"]["num-cpus"]) for group in found}

    assert groups("--deployment.servers-per-node", "2") == {"train": (2, "2"), "infer": (2, "2")}
    on_cpus = ["--deployment.gpus-per-node", "0", "--deployment.num-env-nodes", "1"]
    assert groups(*on_cpus) == {"train": (2, "8"), "infer": (3, "8"), "env": (1, "8")}


def test_trivet_cluster_writes_what_the_command_writes(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(FILE)
    (tmp_path / "nodes.toml").write_text('[deployment]\ntype = "multi_node"\n')
    assert cli.main(["cluster", "kubernetes", "run.toml", "@", "nodes.toml", "--kubernetes.name", "mine"]) == 0
    assert capsys.readouterr().out.endswith("kubectl apply -f run-1/kubernetes/rayjob.yaml\n")
    _, found = yaml.safe_load_all((tmp_path / "run-1/kubernetes/rayjob.yaml").read_text())
    assert (found["kind"], found["metadata"]["name"]) == ("RayJob", "mine")
    assert cli.main(["cluster", "skypilot", "run.toml"]) == 2
    assert "needs a table [skypilot]" in capsys.readouterr().err
