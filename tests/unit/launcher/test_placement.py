"""Each node has roles that follow from the configuration alone."""

from typing import Any

import pytest

from trivet.config.schema.rl import RLConfig
from trivet.launcher.placement import (
    ENVIRONMENTS,
    RENDEZVOUS,
    TRANSPORT,
    Placement,
    describe_placement,
    nodes_with_own_directory,
    place,
)


def make_placement(*, lost: tuple[int, ...] = (), changes: dict[str, Any] | None = None, **deployment: Any) -> Placement:
    section = {"type": "multi_node", "gpus_per_node": 0, **deployment}
    return place(RLConfig.model_validate({"deployment": section, **(changes or {})}), lost=frozenset(lost))


TWO_TRAIN = {"num_train_nodes": 2, "gpus_per_node": 8}
THREE_SERVERS = {**TWO_TRAIN, "num_infer_replicas": 3, "servers_per_node": 2}


@pytest.mark.parametrize(
    ("deployment", "lines"),
    [
        pytest.param(
            {},
            ["node 0: trainer rank 0, orchestrator", "node 1: inference"],
            id="one trains and one serves, without GPUs",
        ),
        pytest.param(
            {"changes": {"trainer_cpu_ranks": 3}},
            ["node 0: trainer rank 0-2, orchestrator", "node 1: inference"],
            id="several ranks on a node without GPUs",
        ),
        pytest.param(
            {"gpus_per_node": 8},
            ["node 0: trainer rank 0-7, orchestrator", "node 1: inference on GPU 0-7"],
            id="one trains and one serves, with GPUs",
        ),
        pytest.param(
            THREE_SERVERS,
            [
                "node 0: trainer rank 0-7, orchestrator",
                "node 1: trainer rank 8-15",
                "node 2: inference on GPU 0-3",
                "node 3: inference-1 on GPU 0-3",
                "node 4: inference-2 on GPU 0-3",
            ],
            id="servers of which two find room in a node's GPUs",
        ),
        pytest.param(
            {"gpus_per_node": 2, "num_infer_replicas": 2, "servers_per_node": 2},
            ["node 0: trainer rank 0-1, orchestrator", "node 1: inference on GPU 0", "node 2: inference-1 on GPU 0"],
            id="a server of one GPU",
        ),
        pytest.param(
            {"gpus_per_node": 8, "num_infer_nodes": 2, "num_infer_replicas": 2},
            [
                "node 0: trainer rank 0-7, orchestrator",
                "node 1: inference shard 0 of 2 on GPU 0-7",
                "node 2: inference shard 1 of 2 on GPU 0-7",
                "node 3: inference-1 shard 0 of 2 on GPU 0-7",
                "node 4: inference-1 shard 1 of 2 on GPU 0-7",
            ],
            id="servers over two nodes each",
        ),
        pytest.param(
            {"num_infer_nodes": 2, "orchestrator_on_inference": True},
            ["node 0: trainer rank 0", "node 1: inference shard 0 of 2, orchestrator", "node 2: inference shard 1 of 2"],
            id="the orchestrator beside the first shard",
        ),
        pytest.param(
            {**TWO_TRAIN, "orchestrator_on_inference": True},
            ["node 0: trainer rank 0-7", "node 1: trainer rank 8-15", "node 2: inference on GPU 0-7, orchestrator"],
            id="the orchestrator beside the first server",
        ),
        pytest.param(
            {**TWO_TRAIN, "num_infer_nodes": 0, "changes": {"inference": None}},
            ["node 0: trainer rank 0-7, orchestrator", "node 1: trainer rank 8-15"],
            id="servers of someone else",
        ),
        pytest.param(
            {"num_env_nodes": 1, "max_env_nodes": 2},
            [
                "node 0: trainer rank 0, orchestrator",
                "node 1: inference",
                "node 2: environment workers",
                "node 3: environment workers",
            ],
            id="environment workers on nodes of their own",
        ),
    ],
)
def test_every_node_has_its_roles(deployment: dict[str, Any], lines: list[str]) -> None:
    assert list(describe_placement(make_placement(**deployment))) == lines


@pytest.mark.parametrize(
    ("lost", "trainer_nodes", "num_ranks", "of_node_2"),
    [
        ((), (0, 1, 2), 24, ("trainer rank 16-23",)),
        ((1,), (0, 2), 16, ("trainer rank 8-15",)),
        ((1, 2), (0,), 8, ()),
        ((3,), (0, 1, 2), 24, ("trainer rank 16-23",)),
    ],
)
def test_ranks_are_numbered_anew_without_the_nodes_that_are_lost(
    lost: tuple[int, ...], trainer_nodes: tuple[int, ...], num_ranks: int, of_node_2: tuple[str, ...]
) -> None:
    placement = make_placement(num_train_nodes=3, gpus_per_node=8, lost=lost)
    assert (placement.trainer_nodes, placement.num_ranks, placement.roles_on(2)) == (trainer_nodes, num_ranks, of_node_2)
    assert placement.num_nodes == 4


def test_a_server_keeps_its_node_and_its_gpus_when_nodes_are_lost() -> None:
    whole, reduced = make_placement(**THREE_SERVERS), make_placement(**THREE_SERVERS, lost=(1, 2))
    assert reduced.servers == whole.servers
    assert [(server.node, server.gpu_ids) for server in whole.servers] == [
        (2, (0, 1, 2, 3)),
        (3, (0, 1, 2, 3)),
        (4, (0, 1, 2, 3)),
    ]


def test_a_lost_node_without_a_role_is_described() -> None:
    lines = list(describe_placement(make_placement(num_train_nodes=2, lost=(1,))))
    assert lines[1] == "node 1: nothing"


@pytest.mark.parametrize(("transport", "nodes"), [("files", set()), ("http", {2, 3, 4})])
def test_only_nodes_that_train_need_the_output_directory_when_weights_travel_over_http(transport: str, nodes: set[int]) -> None:
    deployment = {"type": "multi_node", "gpus_per_node": 0, "num_train_nodes": 2, "num_infer_replicas": 2, "num_env_nodes": 1}
    config = RLConfig.model_validate({"deployment": deployment, "trainer": {"weights": {"transport": transport}}})
    assert nodes_with_own_directory(config) == nodes


def test_servers_listen_on_their_nodes_and_the_trainer_on_the_first() -> None:
    placement = make_placement(**THREE_SERVERS)
    assert {node: placement.listeners_on(node) for node in range(placement.num_nodes)} == {
        0: (TRANSPORT, RENDEZVOUS),
        1: (),
        2: ("inference",),
        3: ("inference-1",),
        4: ("inference-2",),
    }


@pytest.mark.parametrize(("number", "names"), [(2, (ENVIRONMENTS,)), (0, ())])
def test_the_orchestrator_listens_for_environment_workers_of_other_nodes(number: int, names: tuple[str, ...]) -> None:
    assert make_placement(num_env_nodes=number).listeners_on(0) == (TRANSPORT, RENDEZVOUS, *names)


def test_the_first_shard_of_a_server_alone_listens() -> None:
    placement = make_placement(num_infer_nodes=2, num_infer_replicas=2)
    assert {node: placement.listeners_on(node) for node in range(1, placement.num_nodes)} == {
        1: ("inference", "inference-rendezvous"),
        2: (),
        3: ("inference-1", "inference-1-rendezvous"),
        4: (),
    }
