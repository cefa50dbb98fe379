"""What is written has the fields that the schedulers publish, and no others."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError
from kubeflow_trainer_api.models.io_k8s_api_batch_v1_job import IoK8sApiBatchV1Job
from kubeflow_trainer_api.models.io_k8s_api_core_v1_config_map import IoK8sApiCoreV1ConfigMap

from trivet.config.load import load_config
from trivet.config.schema.rl import RLConfig
from trivet.schedulers.documents import to_yaml
from trivet.schedulers.kubernetes import make_manifest
from trivet.schedulers.skypilot import make_task

NEEDED = ["--orchestrator.rollouts-per-example", "4", "--orchestrator.env.id", "x", "--output-dir", "run-1"]
NODES = ["--deployment.type", "multi_node", "--deployment.num-train-nodes", "2", "--deployment.num-infer-replicas", "3"]
KUBERNETES = ["--kubernetes.image", "registry.example/trivet:1", "--kubernetes.volume-claim", "runs"]
SKYPILOT = ["--skypilot.working-dir", "/runs"]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--kubernetes.queue", "team", "--kubernetes.cpus", "4"],
        ["--kubernetes.secret-env.WANDB_API_KEY", "wandb/key", "--kubernetes.env.A", "b", "--kubernetes.memory", "64Gi"],
        ["--kubernetes.pod-overrides", '{"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]}'],
        ["--kubernetes.pod-overrides", '{"nodeSelector": {"pool": "a"}, "serviceAccountName": "runner"}'],
    ],
)
def test_a_manifest_has_the_published_fields_alone(flags: list[str]):
    """The models drop what they do not know, so that an unknown field is missing afterwards."""
    config = load_config(RLConfig, [*NEEDED, *KUBERNETES, *flags]).config
    config_map, found = yaml.safe_load_all(to_yaml(make_manifest(config, command="rl", configuration="a = 1\n")))
    for written, model in ((config_map, IoK8sApiCoreV1ConfigMap), (found, IoK8sApiBatchV1Job)):
        read = model.from_dict(written)
        assert read is not None
        assert read.to_dict() == written


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--deployment.max-infer-replicas", "4", "--deployment.num-env-nodes", "1", "--deployment.env-resources", '{"a": 1}'],
        ["--kubernetes.cpus", "4", "--kubernetes.secret-env.WANDB_API_KEY", "wandb/key"],
        [
            "--deployment.ray.labels",
            '{"ray.io/accelerator-type": "H100"}',
            "--kubernetes.pod-overrides",
            '{"nodeSelector": {"pool": "a"}}',
        ],
        ["--kubernetes.pod-overrides", '{"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]}'],
    ],
)
def test_a_ray_job_has_fields_that_kuberay_publishes(flags: list[str]):
    config = load_config(RLConfig, [*NEEDED, *KUBERNETES, *NODES, *flags]).config
    _, found = yaml.safe_load_all(to_yaml(make_manifest(config, command="rl", configuration="a = 1\n")))
    schema = json.loads((Path(__file__).parent / "rayjob_schema.json").read_text())
    Draft202012Validator(schema["schema"]).validate(found)
    found["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 1
    with pytest.raises(ValidationError, match="'replica' was unexpected"):
        Draft202012Validator(schema["schema"]).validate(found)


@pytest.fixture
def schemas() -> Any:
    """The schemas of SkyPilot, whose package is too large to be installed for this alone: 40 packages, with a server's."""
    return pytest.importorskip("sky.utils.schemas", reason="needs skypilot 0.14")


@pytest.mark.filterwarnings("ignore")  # of the package
@pytest.mark.parametrize(
    "flags",
    [
        ["--skypilot.accelerator", "H100"],
        ["--skypilot.accelerator", "H100", *NODES, "--skypilot.task-overrides", '{"resources": {"cpus": "16+"}}'],
        ["--skypilot.gpus-per-node", "0", "--skypilot.image", "registry.example/trivet:1", "--skypilot.setup", "true"],
        ["--skypilot.gpus-per-node", "0", "--skypilot.secrets", "WANDB_API_KEY", "--skypilot.env.A", "b"],
        ["--skypilot.gpus-per-node", "0", "--skypilot.task-overrides", '{"volumes": {"/runs": "runs"}}'],
    ],
)
def test_a_task_is_one_by_the_schema_of_skypilot(schemas: Any, flags: list[str]):
    config = load_config(RLConfig, [*NEEDED, *SKYPILOT, *flags]).config
    task = yaml.safe_load(to_yaml([make_task(config, command="rl", configuration=Path("/here/rl.toml"))]))
    Draft202012Validator(schemas.get_task_schema()).validate(task)
    Draft202012Validator(schemas.get_resources_schema()).validate(task["resources"])
