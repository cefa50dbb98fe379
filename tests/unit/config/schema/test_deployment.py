"""The nodes of a run are counted and checked when the configuration is read."""

from typing import Any

import pytest
from pydantic import ValidationError

from trivet.config.load import load_config
from trivet.config.schema.deployment import DeploymentConfig
from trivet.config.schema.rl import RLConfig
from trivet.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "num_serving", "num_nodes"),
    [
        ({}, 1, 2),
        ({"num_train_nodes": 4}, 1, 5),
        ({"num_infer_replicas": 3}, 3, 4),
        ({"num_infer_replicas": 3, "servers_per_node": 2}, 2, 3),
        ({"num_infer_replicas": 4, "servers_per_node": 2}, 2, 3),
        ({"num_infer_nodes": 2, "num_infer_replicas": 3}, 6, 7),
        ({"num_infer_nodes": 0, "num_train_nodes": 2}, 0, 2),
    ],
)
def test_nodes_are_counted(changes: dict[str, Any], num_serving: int, num_nodes: int) -> None:
    deployment = DeploymentConfig.model_validate({"type": "multi_node", **changes})
    assert (deployment.num_serving_nodes, deployment.num_nodes) == (num_serving, num_nodes)


def test_a_run_of_one_node_is_the_default() -> None:
    assert (DeploymentConfig().is_multi_node, DeploymentConfig().num_nodes) == (False, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_infer_nodes": 2, "servers_per_node": 2}, "remove servers_per_node"),
        ({"servers_per_node": 3}, r"servers_per_node \(3\) must divide gpus_per_node \(8\)"),
        ({"num_train_nodes": 3, "nodes_per_fsdp_group": 2}, r"nodes_per_fsdp_group \(2\) must divide num_train_nodes \(3\)"),
        ({"num_train_nodes": 2, "min_train_nodes": 3}, r"min_train_nodes \(3\) must be <= num_train_nodes \(2\)"),
        ({"num_infer_nodes": 0, "orchestrator_on_inference": True}, "needs a node that serves"),
        ({"lost_after_s": 2}, "lost_after_s"),
        ({"node_rank": -1}, "node_rank"),
        ({"host": "two words\n"}, "no name or address of a machine"),
    ],
)
def test_nodes_that_do_not_fit_together_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DeploymentConfig.model_validate({"type": "multi_node", **changes})


def test_keys_of_several_nodes_are_refused_for_one() -> None:
    with pytest.raises(ValidationError, match='node_rank, num_train_nodes need type = "multi_node"'):
        DeploymentConfig.model_validate({"num_train_nodes": 2, "node_rank": 0})


def test_a_resolved_configuration_of_one_node_names_every_key_and_is_read_again() -> None:
    assert DeploymentConfig.model_validate(DeploymentConfig(gpus_per_node=4).model_dump()) == DeploymentConfig(gpus_per_node=4)


RUN = ("--orchestrator.rollouts-per-example", "2", "--max-steps", "10", "--deployment.type", "multi_node")
NO_SERVER = ("--inference", "None", "--orchestrator.client.base-url", "http://far:8000/v1")


def test_a_run_of_several_nodes_is_read_from_flags() -> None:
    config = load_config(
        RLConfig, (*RUN, "--deployment.num-train-nodes", "2", "--deployment.node-rank", "1"), environ={}
    ).config
    assert (config.deployment.num_nodes, config.deployment.node_rank) == (3, 1)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (NO_SERVER, r"num.infer.nodes \(1\) must be 0 if the run starts no server"),
        (("--deployment.num-infer-nodes", "0"), r"num.infer.nodes \(0\) must be 0 if the run starts no server"),
        (("--deployment.num-infer-nodes", "2"), r"inference\.parallel\.tp \(1\) must be the GPUs of the server"),
        (("--deployment.num-train-nodes", "2", "--trainer.model.dp-replicate", "3"), "ranks of all nodes"),
        (("--inference.parallel.tp", "3"), r"8 GPU\(s\), which must be divisible by inference\.parallel\.tp"),
        (("--deployment.servers-per-node", "4", "--inference.parallel.tp", "4"), r"2 GPU\(s\), which must be divisible"),
    ],
)
def test_a_run_that_does_not_fit_its_nodes_is_refused(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(RLConfig, (*RUN, *argv), environ={})


def test_a_run_without_servers_of_its_own_needs_no_nodes_that_serve() -> None:
    config = load_config(RLConfig, (*RUN, *NO_SERVER, "--deployment.num-infer-nodes", "0"), environ={}).config
    assert (config.inference, config.deployment.num_nodes) == (None, 1)
