"""The nodes of a run are bundles of a Ray cluster, which follow from the configuration alone."""

from typing import Any

import pytest
from pydantic import ValidationError

from trivet.cluster.bundles import BundleGroup, group_bundles
from trivet.config.schema.rl import RLConfig
from trivet.launcher.placement import place, required_nodes


def make_config(**deployment: Any) -> RLConfig:
    return RLConfig.model_validate({"deployment": {"type": "multi_node", "gpus_per_node": 8, **deployment}})


def group(config: RLConfig, **machine: float) -> list[BundleGroup]:
    return list(group_bundles(config.deployment, place(config), address="10.0.0.1", machine=machine))


def describe(**deployment: Any) -> list[str]:
    return [each.describe() for each in group(make_config(**deployment))]


def test_training_nodes_are_one_group_and_every_server_is_its_own() -> None:
    assert describe(num_train_nodes=2, num_infer_replicas=2) == [
        "trainer: 2 bundles of 8 GPU, 1 CPU",
        "inference: 1 bundle of 8 GPU, 1 CPU",
        "inference-1: 1 bundle of 8 GPU, 1 CPU",
    ]


def test_servers_of_a_machine_are_parts_of_it() -> None:
    found = describe(num_infer_replicas=2, servers_per_node=4)
    assert found[1:] == ["inference: 1 bundle of 2 GPU, 1 CPU", "inference-1: 1 bundle of 2 GPU, 1 CPU"]


def test_a_server_over_machines_has_a_bundle_on_each() -> None:
    config = RLConfig.model_validate(
        {
            "deployment": {"type": "multi_node", "gpus_per_node": 8, "num_infer_nodes": 2},
            "inference": {"parallel": {"tp": 16}},
        }
    )
    groups = group(config)
    assert groups[1].nodes == (1, 2)


def test_environment_nodes_have_cpus_and_the_resources_of_their_sandboxes() -> None:
    found = describe(num_env_nodes=2, env_cpus_per_node=16, env_resources={"sandbox": 1}, gpus_per_node=0)
    assert found[:2] == ["env-workers-2: 1 bundle of 16 CPU, 1 sandbox", "env-workers-3: 1 bundle of 16 CPU, 1 sandbox"]


def test_labels_are_for_machines_with_gpus() -> None:
    config = make_config(num_env_nodes=1, ray={"labels": {"ray.io/accelerator-type": "H100"}})
    labels = {each.name: dict(each.labels) for each in group(config)}
    wanted = {"ray.io/accelerator-type": "H100"}
    assert labels == {"trainer": wanted, "inference": wanted, "env-workers-2": {}}


@pytest.mark.parametrize(
    ("num_train_nodes", "resources", "is_kept"),
    [
        (1, {"GPU": 8.0, "CPU": 64.0}, True),
        (1, {"GPU": 4.0, "CPU": 64.0}, False),  # such as a machine that only drives the run
        (1, {}, False),
        (2, {"GPU": 8.0, "CPU": 64.0}, False),
    ],
)
def test_a_single_node_that_trains_is_kept_on_the_drivers_machine_if_it_fits_there(
    num_train_nodes: int, resources: dict[str, float], is_kept: bool
) -> None:
    config = make_config(num_train_nodes=num_train_nodes)
    trainer, server = group(config, **resources)
    assert [{**each.resources} for each in (trainer, server)] == [
        {"GPU": 8.0, "CPU": 1.0} | ({"node:10.0.0.1": 0.001} if is_kept else {}),
        {"GPU": 8.0, "CPU": 1.0},
    ]


def test_a_run_starts_without_the_nodes_that_may_join_it() -> None:
    config = make_config(num_infer_replicas=1, max_infer_replicas=3, num_env_nodes=1, max_env_nodes=4)
    assert place(config).num_nodes == 1 + 3 + 4
    assert required_nodes(config) == {0, 1, 4}
    assert [server.name for server in place(config, known={0, 1, 4}).servers] == ["inference"]
    assert [server.name for server in place(config, known={0, 1, 3, 4}).servers] == ["inference", "inference-2"]


@pytest.mark.parametrize(
    ("deployment", "problem"),
    [
        ({"num_infer_replicas": 2, "max_infer_replicas": 1}, "must be >= num_infer_replicas"),
        ({"max_env_nodes": 2}, "at least 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(deployment: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        make_config(**deployment)


def test_every_node_that_trains_holds_the_ports_of_the_first_whose_place_it_may_take() -> None:
    placement = place(make_config(num_train_nodes=2, num_env_nodes=1))
    assert placement.listeners_on(1) == ()
    assert placement.possible_listeners_on(1) == placement.listeners_on(0) == ("transport", "rendezvous", "environments")
    assert placement.possible_listeners_on(2) == placement.listeners_on(2) == ("inference",)
