"""A node learns its number from its command or from what a scheduler has set."""

from typing import Any

import pytest

from trivet.config.schema.deployment import DeploymentConfig
from trivet.errors import ConfigError
from trivet.launcher.nodes.identity import NodeIdentity, identify_node

SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}
SKYPILOT = {"SKYPILOT_NODE_RANK": "2", "SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_IPS": "10.1.0.1\n10.1.0.2\n10.1.0.3"}
KUBEFLOW = {"PET_NODE_RANK": "1", "PET_NNODES": "3", "PET_MASTER_ADDR": "job-node-0-0.job"}
LEADER_WORKER_SET = {"LWS_WORKER_INDEX": "2", "LWS_GROUP_SIZE": "3", "LWS_LEADER_ADDRESS": "lws-0.lws.default"}
JOBSET = {
    "JOBSET_NODE_BASE": "1",
    "JOBSET_JOB_INDEX": "0",
    "JOBSET_JOB_SIZE": "2",
    "JOB_COMPLETION_INDEX": "1",
    "JOBSET_HEAD": "run-train-0-0.run",
    "JOBSET_NODES": "3",
}


def make_deployment(**changes: Any) -> DeploymentConfig:
    """Return a deployment of three nodes, two of which train, with `changes`."""
    return DeploymentConfig.model_validate({"type": "multi_node", "num_train_nodes": 2, **changes})


@pytest.mark.parametrize(
    ("environ", "index", "head", "source"),
    [
        pytest.param(SLURM, 1, "10.0.0.1", "SLURM", id="SLURM"),
        pytest.param(SKYPILOT, 2, "10.1.0.1", "SkyPilot", id="SkyPilot"),
        pytest.param(KUBEFLOW, 1, "job-node-0-0.job", "Kubeflow", id="Kubeflow"),
        pytest.param(LEADER_WORKER_SET, 2, "lws-0.lws.default", "LeaderWorkerSet", id="LeaderWorkerSet"),
        pytest.param(JOBSET, 2, "run-train-0-0.run", "JobSet", id="JobSet"),
        pytest.param(
            JOBSET | {"JOBSET_NODE_BASE": "0", "JOBSET_JOB_INDEX": "1", "JOBSET_JOB_SIZE": "1", "JOB_COMPLETION_INDEX": "0"},
            1,
            "run-train-0-0.run",
            "JobSet",
            id="the second job of a JobSet",
        ),
        pytest.param({"SLURM_PROCID": "0"}, 0, None, "SLURM", id="a scheduler that tells the number alone"),
        pytest.param(SLURM | {"SLURM_LAUNCH_NODE_IPADDR": ""}, 1, None, "SLURM", id="an empty name of the first node"),
        pytest.param(SLURM | SKYPILOT, 2, "10.1.0.1", "SkyPilot", id="a cloud whose machines are jobs of SLURM"),
        pytest.param(SLURM | JOBSET, 2, "run-train-0-0.run", "JobSet", id="pods on machines that are jobs of SLURM"),
    ],
)
def test_a_scheduler_says_which_node_this_is(environ: dict[str, str], index: int, head: str | None, source: str) -> None:
    assert identify_node(make_deployment(), environ) == NodeIdentity(index=index, head=head, source=source)


@pytest.mark.parametrize("environ", [{}, SLURM, JOBSET, SLURM | {"SLURM_NTASKS": "7"}])
def test_the_number_in_the_command_counts_before_any_scheduler(environ: dict[str, str]) -> None:
    found = identify_node(make_deployment(node_rank=0), environ)
    assert found == NodeIdentity(index=0, head=None, source="deployment.node_rank")


def refusal(environ: dict[str, str], **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        identify_node(make_deployment(**changes), environ)
    return str(caught.value)


def test_a_node_without_a_number_is_refused() -> None:
    said = refusal({"HOSTNAME": "node7"})
    assert "nothing says which node this is" in said
    assert "--deployment.node-rank 0, 1, 2 and so on" in said


@pytest.mark.parametrize(
    "environ",
    [
        SLURM | {"SLURM_NTASKS": "4"},
        SKYPILOT | {"SKYPILOT_NUM_NODES": "4"},
        KUBEFLOW | {"PET_NNODES": "4"},
        LEADER_WORKER_SET | {"LWS_GROUP_SIZE": "4"},
        JOBSET | {"JOBSET_NODES": "4"},
    ],
)
def test_another_number_of_nodes_than_the_configuration_has_is_refused(environ: dict[str, str]) -> None:
    source = identify_node(make_deployment(num_train_nodes=3), environ).source
    said = refusal(environ)
    assert f"the configuration has 3 nodes (2 that train and 1 that serve), and {source} started 4" in said


@pytest.mark.parametrize(
    ("environ", "changes", "source"),
    [({}, {"node_rank": 3}, "deployment.node_rank"), ({"SLURM_PROCID": "3"}, {}, "SLURM")],
)
def test_a_number_that_no_node_has_is_refused(environ: dict[str, str], changes: dict[str, Any], source: str) -> None:
    said = refusal(environ, **changes)
    assert f"this is node 3 ({source}), and the configuration has nodes 0 to 2" in said
