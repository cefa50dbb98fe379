from pathlib import Path
from typing import Any

import pytest

from trivet.config.dump import to_toml
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import RunIdentity
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import ConfigError
from trivet.launcher.gpu_shares import share_gpus
from trivet.launcher.plan import Ports, ProcessSpec, RunPlan, plan
from trivet.machine import Machine

CONFIGS = Path("outputs/configs")
TEACHER = {"teacher_inference": {"model": {"name": "big"}, "is_teacher": True, "server": {"port": 8001}}}
ASKED = {"teacher_model": {"model": {"name": "big"}, "client": {"base_url": ["http://127.0.0.1:8001/v1"]}}}


def make_plan(*, num_gpus: int = 0, ports: Ports | None = None, resume_step: int | None = None, **changes: Any) -> RunPlan:
    return plan(
        RLConfig.model_validate(changes),
        machine=Machine(gpus=tuple(map(str, range(num_gpus))), num_cpus=8),
        python="python",
        run=RunIdentity(id="r", attempt=2),
        ports=ports or Ports(inference=8000, transport=5555),
        resume_step=resume_step,
    )


def process(planned: RunPlan, name: str) -> ProcessSpec:
    return next(spec for spec in planned.processes if spec.name == name)


def server_config(planned: RunPlan, name: str = "inference") -> InferenceConfig:
    section = planned.configs[CONFIGS / f"{name}.toml"]
    assert isinstance(section, InferenceConfig)
    return section


def orchestrator_config(planned: RunPlan) -> OrchestratorConfig:
    section = planned.configs[CONFIGS / "orchestrator.toml"]
    assert isinstance(section, OrchestratorConfig)
    return section


def trainer_config(planned: RunPlan) -> TrainerConfig:
    section = planned.configs[CONFIGS / "trainer.toml"]
    assert isinstance(section, TrainerConfig)
    return section


def test_three_roles_are_started_from_their_resolved_files_with_the_identity_of_the_run() -> None:
    planned = make_plan()
    assert [spec.name for spec in planned.processes] == ["inference", "trainer", "orchestrator"]
    server = ("python", "-P", "-m", "trivet.inference.main", "@", "outputs/configs/inference.toml")
    assert process(planned, "inference").argv == server
    ranks = ("trivet.trainer.ranks.starter", "1", "trivet.trainer.main", "@", "outputs/configs/trainer.toml")
    assert process(planned, "trainer").argv[3:] == ranks
    assert [spec.does_finish for spec in planned.processes] == [False, True, True]
    for section in (server_config(planned), orchestrator_config(planned), trainer_config(planned)):
        assert section.run == RunIdentity(id="r", attempt=2)


def test_with_gpus_ranks_may_not_compute_on_the_cpu_and_count_them_as_nvidia_smi_does() -> None:
    with_gpus, without = make_plan(num_gpus=2), make_plan()
    assert [process(planned, "trainer").argv[8:] for planned in (with_gpus, without)] == [("--device", "cuda"), ()]
    for name in ("inference", "trainer"):
        orders = [process(planned, name).env_defaults.get("CUDA_DEVICE_ORDER") for planned in (with_gpus, without)]
        assert orders == ["PCI_BUS_ID", None]
    allocator = process(with_gpus, "trainer").env_defaults["PYTORCH_CUDA_ALLOC_CONF"]
    assert set(allocator.split(",")) == {"expandable_segments:True", "pinned_max_round_threshold_mb:1"}
    assert "PYTORCH_CUDA_ALLOC_CONF" not in process(without, "trainer").env_defaults


def test_servers_of_someone_else_are_not_started_and_keep_their_address() -> None:
    planned = make_plan(inference=None, orchestrator={"client": {"base_url": ["http://127.0.0.1:8000/v1"]}}, num_gpus=2)
    assert [spec.name for spec in planned.processes] == ["trainer", "orchestrator"]
    assert orchestrator_config(planned).client.base_url == ["http://127.0.0.1:8000/v1"]


def test_a_taken_port_is_replaced_in_every_role_and_said() -> None:
    planned = make_plan(ports=Ports(inference=40001, transport=40002))
    assert server_config(planned).server.port == 40001
    assert orchestrator_config(planned).client.base_url == ["http://127.0.0.1:40001/v1"]
    assert orchestrator_config(planned).rollout_transport.port == 40002
    assert trainer_config(planned).rollout_transport.port == 40002
    assert planned.server_urls == {"inference": ("http://127.0.0.1:40001/v1",)}
    assert len(planned.notices) == 2
    assert "inference.server.port 8000 is not free; using 40001" in planned.notices


def test_an_origin_is_started_where_servers_fetch_policies_and_is_a_unit_of_its_own() -> None:
    weights = {"transport": "http", "origin": {"host": "0.0.0.0", "advertise": "trainer.example"}}
    roles = {"trainer": {"weights": weights}, "orchestrator": {"weights": weights}}
    planned = make_plan(ports=Ports(inference=8000, transport=5555, origin=40003), **roles)
    assert [spec.name for spec in planned.processes] == ["inference", "origin", "trainer", "orchestrator"]
    origin = process(planned, "origin")
    assert origin.argv == ("python", "-P", "-m", "trivet.origin", "@", "outputs/configs/trainer.toml")
    assert (origin.unit, origin.does_finish) == ("origin", False)
    for role in (trainer_config(planned), orchestrator_config(planned)):
        assert role.weights.origin_url == "http://trainer.example:40003"
    assert planned.server_urls["origin"] == ("http://127.0.0.1:40003",)
    assert planned.notices == ("weights.origin.port 5556 is not free; using 40003",)
    replayed = make_plan(inference=None, trainer=roles["trainer"], orchestrator=roles["orchestrator"] | {"replay": "batches"})
    assert [spec.name for spec in replayed.processes] == ["trainer", "orchestrator"]


def test_a_server_on_another_machine_keeps_its_port() -> None:
    urls = ["http://127.0.0.1:8000/v1", "http://node7:8000/v1"]
    planned = make_plan(orchestrator={"client": {"base_url": urls}}, ports=Ports(inference=40001, transport=5555))
    assert orchestrator_config(planned).client.base_url == ["http://127.0.0.1:40001/v1", "http://node7:8000/v1"]


@pytest.mark.parametrize(
    ("ckpt", "expected"), [({}, (None, 6, [])), ({"resume_from": "a"}, (None, 6, ["*"]))], ids=["resume", "fork"]
)
def test_both_roles_resume_the_checkpoint_they_were_given_a_fork_under_settings_of_its_own(
    ckpt: dict[str, str], expected: tuple[object, ...]
) -> None:
    planned = make_plan(trainer={"ckpt": ckpt}, orchestrator={"ckpt": ckpt}, resume_step=6)
    for role in (trainer_config(planned), orchestrator_config(planned)):
        assert (role.ckpt.resume_from, role.ckpt.resume_step, role.ckpt.allow_changes) == expected


def test_a_run_with_no_step_left_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_steps \(50\) must be above the step resumed from \(50\)"):
        make_plan(max_steps=50, resume_step=50)


def test_without_a_gpu_the_ranks_share_the_cores() -> None:
    trainer = process(make_plan(trainer_cpu_ranks=2), "trainer")
    assert trainer.argv[4] == "2"
    assert trainer.env_defaults["OMP_NUM_THREADS"] == "4"
    assert trainer.env_defaults["MALLOC_MMAP_MAX_"] == "0"
    # Without these names gloo and NCCL listen at the address of the machine's own name.
    assert (trainer.env_defaults["GLOO_SOCKET_IFNAME"], trainer.env_defaults["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert "CUDA_VISIBLE_DEVICES" not in trainer.env


def test_gpus_are_given_by_id() -> None:
    planned = make_plan(inference_gpu_ids=[0, 1, 2], trainer_gpu_ids=[3], num_gpus=4)
    assert process(planned, "inference").env["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert process(planned, "trainer").env["CUDA_VISIBLE_DEVICES"] == "3"
    assert server_config(planned).parallel.dp == 3
    assert trainer_config(planned).gpu_memory_utilization == 1.0
    assert "MALLOC_MMAP_MAX_" not in process(planned, "trainer").env_defaults


def test_ids_count_within_the_gpus_that_are_visible() -> None:
    assert share_gpus(RLConfig(), ("4", "6")).trainer == ("6",)


def test_one_gpu_is_shared_with_memory_for_both() -> None:
    planned = make_plan(num_gpus=1)
    assert process(planned, "trainer").env["CUDA_VISIBLE_DEVICES"] == "0"
    assert server_config(planned).gpu_memory_utilization == 0.5
    assert trainer_config(planned).gpu_memory_utilization == 0.42
    assert any("one GPU" in notice for notice in planned.notices)
    assert any("0.9 is lowered to 0.5" in notice for notice in planned.notices)


SLEEPING = {"inference": {"sleep_while_training": True}, "max_async_level": 0}


@pytest.mark.parametrize(("is_offloaded", "share"), [(False, 0.5), (True, 0.92)])
def test_a_server_that_sleeps_while_the_trainer_learns_leaves_it_the_gpu(is_offloaded: bool, share: float) -> None:
    planned = make_plan(num_gpus=1, trainer={"model": {"fsdp_cpu_offload": is_offloaded}}, **SLEEPING)
    assert server_config(planned).gpu_memory_utilization == min(0.9, share)
    assert trainer_config(planned).gpu_memory_utilization == 0.92


@pytest.mark.parametrize(
    ("num_gpus", "changes", "expected"),
    [
        (0, {}, {"inference": (), "trainer": (), "orchestrator": ()}),
        (1, {}, {"inference": (), "trainer": ("inference",), "orchestrator": ()}),
        (2, {}, {"inference": (), "trainer": (), "orchestrator": ()}),
        (2, {"trainer_gpu_ids": [0, 1]}, {"inference": (), "trainer": ("inference",), "orchestrator": ()}),
        (
            1,
            {**TEACHER, "orchestrator": ASKED},
            {"teacher": (), "inference": ("teacher",), "trainer": ("teacher", "inference"), "orchestrator": ()},
        ),
    ],
)
def test_what_shares_a_gpu_starts_after_the_servers_on_it_answer(
    num_gpus: int, changes: dict[str, Any], expected: dict[str, tuple[str, ...]]
) -> None:
    planned = make_plan(num_gpus=num_gpus, **changes)
    assert {spec.name: spec.starts_after for spec in planned.processes} == expected


def test_a_trainer_on_the_cpu_does_not_see_the_gpus() -> None:
    planned = make_plan(trainer={"device": "cpu"}, num_gpus=2)
    assert process(planned, "trainer").env == {"CUDA_VISIBLE_DEVICES": ""}
    assert process(planned, "inference").env == {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer_gpu_ids": [7]}, r"trainer_gpu_ids = \[7\]: GPU 7 does not exist; this machine shows 2 GPU"),
        ({"inference_gpu_ids": []}, "at least one"),
        ({"inference_gpu_ids": [0, 0]}, "each GPU once"),
        ({"inference_gpu_ids": [0, 1], "inference": {"parallel": {"tp": 4}}}, "2 % 4 = 2"),
        ({"inference_gpu_ids": [0, 1], "inference": {"parallel": {"dp": 4}}}, "GPUs / tp = 2 / 1 = 2"),
        ({"trainer": {"device": "cuda"}, "num_gpus": 0}, "shows no GPU"),
    ],
)
def test_gpus_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(**{"num_gpus": 2, **changes})


def test_a_teacher_is_started_first_under_its_own_name_and_asked_where_it_listens() -> None:
    planned = make_plan(**TEACHER, orchestrator=ASKED, ports=Ports(inference=8000, transport=5555, teacher=40003))
    assert [spec.name for spec in planned.processes] == ["teacher", "inference", "trainer", "orchestrator"]
    spec = process(planned, "teacher")
    assert spec.log.name == "teacher.stdout"
    assert not spec.does_finish
    config = server_config(planned, "teacher")
    assert (config.server.port, config.is_teacher, config.run) == (40003, True, server_config(planned).run)
    assert planned.server_urls["teacher"] == ("http://127.0.0.1:40003/v1",)
    teacher = orchestrator_config(planned).teacher_model
    assert teacher is not None
    assert teacher.client.base_url == ["http://127.0.0.1:40003/v1"]
    assert "teacher_inference.server.port 8001 is not free; using 40003" in planned.notices


def test_the_key_of_a_server_reaches_the_orchestrator_by_its_environment_alone() -> None:
    teacher = {**TEACHER["teacher_inference"], "server": {"port": 8001, "api_key": "theirs"}}
    planned = make_plan(inference={"server": {"api_key": "ours"}}, teacher_inference=teacher, orchestrator=ASKED)
    config = orchestrator_config(planned)
    assert config.teacher_model is not None
    environment = process(planned, "orchestrator").env
    assert config.client.access.api_key(config.client.base_url[0], environment) == "ours"
    assert config.teacher_model.client.access.api_key(config.teacher_model.client.base_url[0], environment) == "theirs"
    assert "ours" not in to_toml(config) + to_toml(trainer_config(planned))


def test_a_teacher_gets_the_gpus_that_are_named_for_it() -> None:
    planned = make_plan(**TEACHER, orchestrator=ASKED, num_gpus=4, teacher_gpu_ids=[2, 3])
    assert process(planned, "teacher").env["CUDA_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(ConfigError, match="teacher_gpu_ids is not set"):
        make_plan(**TEACHER, orchestrator=ASKED, num_gpus=4)


def test_a_teacher_on_the_gpu_of_others_takes_less_of_it() -> None:
    planned = make_plan(**TEACHER, orchestrator=ASKED, num_gpus=1)
    assert server_config(planned, "teacher").gpu_memory_utilization == 0.25
    assert server_config(planned).gpu_memory_utilization == 0.5
    assert trainer_config(planned).gpu_memory_utilization == 0.17
