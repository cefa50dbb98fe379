"""Over several nodes every process is started on its node and finds the others at the addresses of theirs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EnvNodesConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import RunIdentity
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import ConfigError
from trivet.launcher.node_plan import Node, plan_over_nodes
from trivet.launcher.placement import Placement, place
from trivet.launcher.plan import ProcessSpec, RunPlan
from trivet.machine import Machine
from trivet.process.sockets import RankPlace, ServerShard, read_place, read_shard

LAYOUT = RunLayout(Path("outputs"))
RUN = RunIdentity(id="r", attempt=2)
GPUS = ("2", "3", "5", "7")
"""The GPUs of each node: names, not positions."""


def make_nodes(placement: Placement, *, gpus: tuple[str, ...] = ()) -> dict[int, Node]:
    """Return a node at 10.0.0.N for each of the placement; the ports of node N begin at N * 1000."""
    return {
        index: Node(
            index=index,
            name=f"host-{index}",
            host=f"10.0.0.{index}",
            interface=f"eth{index}",
            machine=Machine(gpus=gpus, num_cpus=8),
            ports={name: 1000 * index + 100 + offset for offset, name in enumerate(placement.listeners_on(index))},
        )
        for index in range(placement.num_nodes)
    }


def make_plan(
    deployment: Mapping[str, Any] | None = None,
    *,
    gpus: tuple[str, ...] = (),
    lost: tuple[int, ...] = (),
    changed_nodes: Mapping[int, Mapping[str, Any]] | None = None,
    resume_step: int | None = None,
    **changes: Any,
) -> RunPlan:
    """Plan attempt 2 of a run; without changes one node trains, one serves, and both have no more than their cores."""
    section = {"type": "multi_node", "gpus_per_node": len(gpus), **(deployment or {})}
    config = RLConfig.model_validate({"deployment": section, **changes})
    placement = place(config, lost=frozenset(lost))
    nodes = make_nodes(placement, gpus=gpus)
    for index, update in (changed_nodes or {}).items():
        nodes[index] = replace(nodes[index], **update)
    return plan_over_nodes(config, placement=placement, nodes=nodes, python="python", run=RUN, resume_step=resume_step)


def process(planned: RunPlan, name: str) -> ProcessSpec:
    return next(spec for spec in planned.processes if spec.name == name)


def server_section(planned: RunPlan, name: str = "inference") -> InferenceConfig:
    section = planned.configs[LAYOUT.configs / f"{name}.toml"]
    assert isinstance(section, InferenceConfig)
    return section


def orchestrator_section(planned: RunPlan) -> OrchestratorConfig:
    section = planned.configs[LAYOUT.configs / "orchestrator.toml"]
    assert isinstance(section, OrchestratorConfig)
    return section


def trainer_section(planned: RunPlan) -> TrainerConfig:
    section = planned.configs[LAYOUT.configs / "trainer.toml"]
    assert isinstance(section, TrainerConfig)
    return section


THREE_SERVERS = {"num_train_nodes": 2, "num_infer_replicas": 3, "servers_per_node": 2}


def test_every_process_is_started_on_its_node_with_a_log_of_its_own() -> None:
    planned = make_plan(THREE_SERVERS)
    assert [(spec.name, spec.unit, spec.node, spec.log) for spec in planned.processes] == [
        ("inference", "inference", 2, LAYOUT.log_file("inference.stdout")),
        ("inference-1", "inference-1", 3, LAYOUT.log_file("inference-1.stdout")),
        ("inference-2", "inference-2", 4, LAYOUT.log_file("inference-2.stdout")),
        ("trainer", "training", 0, LAYOUT.log_file("trainer.stdout")),
        ("trainer-1", "training", 1, LAYOUT.log_file("trainer-1.stdout")),
        ("orchestrator", "training", 0, LAYOUT.log_file("orchestrator.stdout")),
    ]


@pytest.mark.parametrize(("is_on_inference", "node"), [(False, 0), (True, 2)])
def test_the_orchestrator_runs_where_the_configuration_has_it(is_on_inference: bool, node: int) -> None:
    planned = make_plan({"num_train_nodes": 2, "orchestrator_on_inference": is_on_inference})
    assert process(planned, "orchestrator").node == node


def test_every_process_reads_a_configuration_that_is_written() -> None:
    planned = make_plan(THREE_SERVERS)
    assert {spec.name: Path(spec.argv[-1]).name for spec in planned.processes} == {
        "inference": "inference.toml",
        "inference-1": "inference-1.toml",
        "inference-2": "inference-2.toml",
        "trainer": "trainer.toml",
        "trainer-1": "trainer.toml",
        "orchestrator": "orchestrator.toml",
    }
    assert {Path(spec.argv[-1]) for spec in planned.processes} == set(planned.configs)


@pytest.mark.parametrize(("lost", "leader"), [((), 0), ((0,), 1)])
def test_the_origin_of_policies_is_where_the_first_rank_is_and_restarts_with_it(lost: tuple[int, ...], leader: int) -> None:
    over_http = {"weights": {"transport": "http"}}
    planned = make_plan({"num_train_nodes": 2}, lost=lost, trainer=over_http, orchestrator=over_http)
    origin = process(planned, "origin")
    assert (origin.node, origin.unit, origin.does_finish) == (leader, "training", False)
    assert Path(origin.argv[-1]) in planned.configs
    urls = {section.weights.origin_url for section in (trainer_section(planned), orchestrator_section(planned))}
    assert urls == {f"http://10.0.0.{leader}:{1000 * leader + 102}"}
    assert trainer_section(planned).weights.origin.host == f"10.0.0.{leader}"


def test_a_run_whose_servers_read_files_has_no_origin() -> None:
    planned = make_plan()
    assert "origin" not in [spec.name for spec in planned.processes]
    assert trainer_section(planned).weights.origin_url is None


def test_every_role_gets_the_identity_of_the_run() -> None:
    planned = make_plan(THREE_SERVERS)
    sections = [server_section(planned, "inference-2"), orchestrator_section(planned), trainer_section(planned)]
    assert [section.run for section in sections] == [RUN] * 3


def test_a_server_knows_its_name_under_which_it_reports() -> None:
    planned = make_plan(THREE_SERVERS)
    assert [server_section(planned, name).name for name in ("inference", "inference-1")] == ["inference", "inference-1"]
    assert [report.process for report in process(planned, "inference-1").reports] == ["inference-1"]


def test_servers_listen_at_the_addresses_that_the_orchestrator_asks() -> None:
    planned = make_plan(THREE_SERVERS)
    listening = [server_section(planned, name).server for name in ("inference", "inference-1", "inference-2")]
    assert [(server.host, server.port) for server in listening] == [("10.0.0.2", 2100), ("10.0.0.3", 3100), ("10.0.0.4", 4100)]
    urls = ["http://10.0.0.2:2100/v1", "http://10.0.0.3:3100/v1", "http://10.0.0.4:4100/v1"]
    assert orchestrator_section(planned).client.base_url == urls
    assert planned.server_urls == {"inference": (urls[0],), "inference-1": (urls[1],), "inference-2": (urls[2],)}


def test_an_address_of_ipv6_is_written_in_brackets() -> None:
    planned = make_plan(changed_nodes={1: {"host": "fd00::2"}})
    assert server_section(planned).server.host == "fd00::2"
    assert orchestrator_section(planned).client.base_url == ["http://[fd00::2]:1100/v1"]


@pytest.mark.parametrize(
    ("configured", "bound"),
    [
        ("127.0.0.1", "10.0.0.1"),
        ("localhost", "10.0.0.1"),
        ("::1", "10.0.0.1"),
        ("0.0.0.0", "0.0.0.0"),
        ("::", "::"),
        ("10.9.0.1", "10.9.0.1"),
    ],
)
def test_a_server_listens_where_others_reach_it(configured: str, bound: str) -> None:
    planned = make_plan(inference={"server": {"host": configured}})
    assert server_section(planned).server.host == bound
    assert orchestrator_section(planned).client.base_url == ["http://10.0.0.1:1100/v1"]


@pytest.mark.parametrize(
    ("configured", "bound"), [("127.0.0.1", "10.0.0.0"), ("0.0.0.0", "0.0.0.0"), ("::", "::"), ("10.9.0.1", "10.9.0.1")]
)
def test_the_trainer_listens_where_the_orchestrator_reaches_it(configured: str, bound: str) -> None:
    transport = {"rollout_transport": {"host": configured}}
    planned = make_plan({"orchestrator_on_inference": True}, trainer=transport, orchestrator=transport)
    for section in (trainer_section(planned).rollout_transport, orchestrator_section(planned).rollout_transport):
        assert (section.host, section.advertise, section.port) == (bound, "10.0.0.0", 100)


def test_servers_of_someone_else_keep_their_addresses() -> None:
    client = {"base_url": ["http://far:8000/v1", "http://further:8000/v1"], "api_key_var": ["THEIR_KEY"]}
    planned = make_plan({"num_infer_nodes": 0}, inference=None, orchestrator={"client": client})
    assert [spec.name for spec in planned.processes] == ["trainer", "orchestrator"]
    assert orchestrator_section(planned).client.base_url == client["base_url"]
    assert orchestrator_section(planned).client.api_key_var == ["THEIR_KEY"]
    assert planned.server_urls == {}


def test_the_key_of_the_servers_opens_every_one_of_them() -> None:
    planned = make_plan({"num_infer_replicas": 2}, inference={"server": {"api_key": "ours"}})
    client, environment = orchestrator_section(planned).client, process(planned, "orchestrator").env
    assert [client.access.api_key(url, environment) for url in client.base_url] == ["ours", "ours"]
    assert server_section(planned, "inference-1").server.api_key == "ours"


def test_a_server_without_a_key_is_asked_without_one() -> None:
    planned = make_plan()
    assert orchestrator_section(planned).client.api_key_var == OrchestratorConfig().client.api_key_var


def test_every_role_gets_the_gpus_of_its_node_by_name() -> None:
    planned = make_plan(THREE_SERVERS, gpus=GPUS)
    assert {spec.name: spec.env.get("CUDA_VISIBLE_DEVICES") for spec in planned.processes} == {
        "inference": "2,3",
        "inference-1": "2,3",
        "inference-2": "2,3",
        "trainer": "2,3,5,7",
        "trainer-1": "2,3,5,7",
        "orchestrator": None,
    }
    assert server_section(planned).parallel.dp == 2


def test_gpus_beyond_those_of_the_configuration_are_left_alone() -> None:
    planned = make_plan({"gpus_per_node": 2}, gpus=GPUS)
    assert [process(planned, name).env["CUDA_VISIBLE_DEVICES"] for name in ("inference", "trainer")] == ["2,3", "2,3"]


def test_a_server_has_all_memory_of_its_gpus() -> None:
    planned = make_plan(THREE_SERVERS, gpus=GPUS)
    assert server_section(planned).gpu_memory_utilization == InferenceConfig().gpu_memory_utilization


def test_a_trainer_without_gpus_does_not_see_those_of_its_node() -> None:
    planned = make_plan(changed_nodes={0: {"machine": Machine(gpus=GPUS, num_cpus=8)}}, trainer_cpu_ranks=2)
    assert process(planned, "trainer").env == {"CUDA_VISIBLE_DEVICES": ""}
    assert process(planned, "trainer").argv[4] == "2"


def test_gpus_of_a_server_that_tensor_parallelism_does_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 GPU\(s\), which must be divisible by inference\.parallel\.tp \(4\)"):
        make_plan(THREE_SERVERS, gpus=GPUS, inference={"parallel": {"tp": 4}})


def test_environment_workers_of_other_nodes_connect_to_the_orchestrator() -> None:
    planned = make_plan({"num_env_nodes": 2, "orchestrator_on_inference": True})
    workers = [spec for spec in planned.processes if spec.name.startswith("env-workers")]
    assert [(spec.name, spec.unit, spec.node, spec.log.name, spec.reports[0].path) for spec in workers] == [
        ("env-workers-2", "env-workers-2", 2, "env-workers-2.stdout", LAYOUT.report_file("env-workers-2")),
        ("env-workers-3", "env-workers-3", 3, "env-workers-3.stdout", LAYOUT.report_file("env-workers-3")),
    ]
    assert workers[0].argv[-3:] == (str(LAYOUT.configs / "orchestrator.toml"), "--env-nodes.own", "2")
    nodes = orchestrator_section(planned).env_nodes
    assert nodes == EnvNodesConfig(own=1, num_required=2, max_nodes=4, host="10.0.0.1", port=1101, drain_timeout_s=48.0)
    assert {spec.name: spec.work for spec in planned.processes} == {
        "inference": "serving",
        "trainer": "",
        "orchestrator": "",
        "env-workers-2": "environments",
        "env-workers-3": "environments",
    }


def test_nodes_with_environment_workers_that_a_ray_cluster_may_add_are_not_required() -> None:
    deployment = {"type": "multi_node", "gpus_per_node": 0, "num_env_nodes": 1, "max_env_nodes": 3}
    config = RLConfig.model_validate({"deployment": deployment})
    placement = place(config)
    nodes = make_nodes(placement)
    del nodes[4]  # Ray has not found a place for it
    planned = plan_over_nodes(config, placement=placement, nodes=nodes, python="python", run=RUN, resume_step=None)
    assert [spec.name for spec in planned.processes if spec.work == "environments"] == ["env-workers-2", "env-workers-3"]
    assert (settings := orchestrator_section(planned).env_nodes) is not None
    assert (settings.num_required, settings.max_nodes) == (1, 5)


def test_environment_workers_of_other_nodes_have_the_key_of_the_servers() -> None:
    planned = make_plan({"num_env_nodes": 1}, inference={"server": {"api_key": "ours"}})
    client = orchestrator_section(planned).client
    assert [client.access.api_key(url, process(planned, "env-workers-2").env) for url in client.base_url] == ["ours"]


def test_a_replay_starts_no_environment_workers() -> None:
    planned = make_plan(
        {"num_infer_nodes": 0, "num_train_nodes": 2, "num_env_nodes": 1}, inference=None, orchestrator={"replay": "other"}
    )
    assert [spec.name for spec in planned.processes] == ["trainer", "trainer-1", "orchestrator"]


def test_environment_workers_beside_the_orchestrator_need_no_nodes() -> None:
    assert orchestrator_section(make_plan()).env_nodes is None


TWO_TRAIN = {"num_train_nodes": 2}


def test_ranks_of_two_nodes_meet_at_the_first() -> None:
    planned = make_plan(TWO_TRAIN, trainer_cpu_ranks=3)
    common = {"num_ranks": 6, "host": "10.0.0.0", "port": 101, "attempt": 2}
    assert read_place(process(planned, "trainer").env) == RankPlace(first_rank=0, **common)
    assert read_place(process(planned, "trainer-1").env) == RankPlace(first_rank=3, **common)
    assert [process(planned, name).argv[4] for name in ("trainer", "trainer-1")] == ["3", "3"]


def test_ranks_of_two_nodes_connect_through_the_interfaces_of_their_nodes() -> None:
    planned = make_plan(TWO_TRAIN, trainer_cpu_ranks=2)
    for name, interface in (("trainer", "eth0"), ("trainer-1", "eth1")):
        defaults = process(planned, name).env_defaults
        assert (defaults["GLOO_SOCKET_IFNAME"], defaults["NCCL_SOCKET_IFNAME"]) == (interface, interface)
        assert defaults["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize("lost", [(), (1,)])
def test_ranks_of_the_only_node_that_trains_meet_over_loopback(lost: tuple[int, ...]) -> None:
    planned = make_plan({"num_train_nodes": 1 + len(lost)}, lost=lost, trainer_cpu_ranks=2)
    assert [spec.name for spec in planned.processes] == ["inference", "trainer", "orchestrator"]
    trainer = process(planned, "trainer")
    assert read_place(trainer.env) is None
    assert trainer.env_defaults["GLOO_SOCKET_IFNAME"] == "lo"


def test_the_nodes_that_are_left_close_ranks() -> None:
    planned = make_plan({"num_train_nodes": 3}, lost=(1,), trainer_cpu_ranks=2)
    follower = process(planned, "trainer-1")
    place = read_place(follower.env)
    assert place is not None
    assert (follower.node, place.first_rank, place.num_ranks) == (2, 2, 4)


def test_every_node_has_the_reports_of_its_own_ranks() -> None:
    planned = make_plan(TWO_TRAIN, trainer_cpu_ranks=2)
    reports = {name: process(planned, name).reports for name in ("trainer", "trainer-1")}
    assert {name: [report.process for report in files] for name, files in reports.items()} == {
        "trainer": ["trainer rank 0 of 4", "trainer rank 1 of 4"],
        "trainer-1": ["trainer rank 2 of 4", "trainer rank 3 of 4"],
    }
    assert [report.path for report in reports["trainer-1"]] == [LAYOUT.report_file("trainer", rank) for rank in (2, 3)]


def test_the_first_node_alone_records_the_end_of_the_trainer() -> None:
    planned = make_plan({"num_train_nodes": 3})
    trainers = [process(planned, name) for name in ("trainer", "trainer-1", "trainer-2")]
    assert [spec.records_end for spec in trainers] == [True, False, False]
    assert all(spec.does_finish and spec.are_children_watched for spec in trainers)
    assert process(planned, "orchestrator").records_end


@pytest.mark.parametrize(
    ("deployment", "lost", "copies"),
    [
        pytest.param({"num_train_nodes": 4, "nodes_per_fsdp_group": 2}, (), 2, id="two nodes a copy"),
        pytest.param({"num_train_nodes": 4, "nodes_per_fsdp_group": 1}, (), 4, id="one node a copy"),
        pytest.param({"num_train_nodes": 4, "nodes_per_fsdp_group": 4}, (), 1, id="one copy over all"),
        pytest.param({"num_train_nodes": 4, "nodes_per_fsdp_group": 2}, (2, 3), 1, id="one group is left"),
        pytest.param({"num_train_nodes": 4, "nodes_per_fsdp_group": 1}, (3,), 3, id="a copy was lost"),
        pytest.param({"num_train_nodes": 6, "nodes_per_fsdp_group": 2}, (3,), 1, id="nodes that make no whole groups"),
        pytest.param({"num_train_nodes": 5}, (), 5, id="no groups of nodes: what the trainer says"),
        pytest.param({"num_train_nodes": 5}, (4,), 1, id="ranks that no longer divide into copies"),
    ],
)
def test_groups_of_nodes_set_the_copies_of_the_model(deployment: dict[str, int], lost: tuple[int, ...], copies: int) -> None:
    planned = make_plan(deployment, lost=lost, trainer={"model": {"dp_replicate": 5}})
    assert trainer_section(planned).model.dp_replicate == copies


def test_a_resume_reaches_both_roles_that_keep_checkpoints() -> None:
    planned = make_plan(resume_step=50)
    assert (trainer_section(planned).ckpt.resume_step, orchestrator_section(planned).ckpt.resume_step) == (50, 50)


def test_a_run_with_no_step_left_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_steps \(50\) must be above the step resumed from \(50\)"):
        make_plan(resume_step=50, max_steps=50)


TWO_WIDE = {"num_infer_nodes": 2, "num_infer_replicas": 2}
WIDE_MODEL = {"inference": {"parallel": {"tp": 8}}}


def test_the_shards_of_a_server_are_started_together_and_read_one_configuration() -> None:
    planned = make_plan(TWO_WIDE, gpus=GPUS, **WIDE_MODEL)
    servers = [spec for spec in planned.processes if spec.unit.startswith("inference")]
    assert [(spec.name, spec.unit, spec.node, Path(spec.argv[-1]).name, spec.log.name) for spec in servers] == [
        ("inference", "inference", 1, "inference.toml", "inference.stdout"),
        ("inference-shard-1", "inference", 2, "inference.toml", "inference-shard-1.stdout"),
        ("inference-1", "inference-1", 3, "inference-1.toml", "inference-1.stdout"),
        ("inference-1-shard-1", "inference-1", 4, "inference-1.toml", "inference-1-shard-1.stdout"),
    ]
    assert [[report.process for report in spec.reports] for spec in servers] == [[spec.name] for spec in servers]
    assert not any(spec.does_finish for spec in servers)


def test_the_first_shard_alone_has_an_address() -> None:
    planned = make_plan(TWO_WIDE, gpus=GPUS, **WIDE_MODEL)
    urls = ["http://10.0.0.1:1100/v1", "http://10.0.0.3:3100/v1"]
    assert orchestrator_section(planned).client.base_url == urls
    assert planned.server_urls == {"inference": (urls[0],), "inference-1": (urls[1],)}
    server = server_section(planned, "inference-1").server
    assert (server.host, server.port) == ("10.0.0.3", 3100)


def test_the_shards_of_a_server_meet_at_its_first_node() -> None:
    planned = make_plan(TWO_WIDE, gpus=GPUS, **WIDE_MODEL)
    shards = {spec.name: read_shard(spec.env) for spec in planned.processes if spec.unit.startswith("inference")}
    assert shards == {
        "inference": ServerShard(index=0, num_shards=2, host="10.0.0.1", port=1101),
        "inference-shard-1": ServerShard(index=1, num_shards=2, host="10.0.0.1", port=1101),
        "inference-1": ServerShard(index=0, num_shards=2, host="10.0.0.3", port=3101),
        "inference-1-shard-1": ServerShard(index=1, num_shards=2, host="10.0.0.3", port=3101),
    }


def test_a_shard_uses_the_gpus_and_the_interface_of_its_own_node() -> None:
    planned = make_plan(TWO_WIDE, gpus=GPUS, changed_nodes={2: {"machine": Machine(gpus=("a", "b", "c", "d"), num_cpus=8)}})
    shard = process(planned, "inference-shard-1")
    assert (shard.env["CUDA_VISIBLE_DEVICES"], shard.env["VLLM_HOST_IP"]) == ("a,b,c,d", "10.0.0.2")
    assert (shard.env_defaults["GLOO_SOCKET_IFNAME"], shard.env_defaults["NCCL_SOCKET_IFNAME"]) == ("eth2", "eth2")


def test_a_server_over_several_nodes_is_one_replica() -> None:
    parallel = server_section(make_plan(TWO_WIDE, gpus=GPUS, **WIDE_MODEL)).parallel
    assert (parallel.tp, parallel.dp) == (8, 1)


def test_a_server_of_one_node_has_no_shards() -> None:
    server = process(make_plan(THREE_SERVERS), "inference")
    assert read_shard(server.env) is None
    assert "GLOO_SOCKET_IFNAME" not in server.env_defaults
