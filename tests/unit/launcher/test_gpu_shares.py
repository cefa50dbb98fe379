"""Test how roles share the memory of a GPU, and what is refused and shown before a run begins."""

from typing import Any

import pytest

from trivet.config.schema.rl import RLConfig
from trivet.errors import ConfigError
from trivet.launcher import run
from trivet.launcher.gpu_shares import describe_memory, require_shared_gpu, share_gpus
from trivet.machine import Machine

SLEEPING = {"inference": {"sleep_while_training": True}, "max_async_level": 0}
TAUGHT = {"teacher_inference": {"model": {"name": "big"}}}
OFFLOADED = {"trainer": {"model": {"fsdp_cpu_offload": True}}}


def describe(num_gpus: int, **changes: Any) -> list[str]:
    config = RLConfig.model_validate(changes)
    return describe_memory(config, share_gpus(config, tuple(map(str, range(num_gpus)))))


@pytest.mark.parametrize(
    ("num_gpus", "changes", "message"),
    [
        (0, {}, []),
        (2, {}, []),
        (1, {}, ["memory of GPU 0: server 0.5 + trainer 0.42 + 0.08 for contexts"]),
        (1, {"inference": {"gpu_memory_utilization": 0.3}}, ["memory of GPU 0: server 0.3 + trainer 0.62 + 0.08 for contexts"]),
        (1, SLEEPING, ["memory of GPU 0: server 0.5 in turn with trainer 0.92 + 0.08 for contexts"]),
        (1, SLEEPING | OFFLOADED, ["memory of GPU 0: server 0.9 in turn with trainer 0.92 + 0.08 for contexts"]),
        (1, TAUGHT, ["memory of GPU 0: teacher 0.25 + server 0.5 + trainer 0.17 + 0.08 for contexts"]),
        (
            1,
            TAUGHT | SLEEPING,
            ["memory of GPU 0: teacher 0.25 + server 0.5 in turn with trainer 0.67 + 0.08 for contexts"],
        ),
        (
            4,
            {**TAUGHT, "inference_gpu_ids": [0, 1], "trainer_gpu_ids": [1, 2], "teacher_gpu_ids": [0, 3]},
            ["memory of GPU 0: teacher 0.25 + server 0.5", "memory of GPU 1: server 0.5 + trainer 0.42 + 0.08 for contexts"],
        ),
    ],
)
def test_the_memory_of_shared_gpus_is_shown_as_a_sum(num_gpus: int, changes: dict[str, Any], message: list[str]) -> None:
    assert describe(num_gpus, **changes) == message


@pytest.mark.parametrize(
    ("num_gpus", "changes", "message"),
    [
        (0, {}, "this machine shows no GPU"),
        (2, {}, "here the two share none"),
        (2, {"trainer": {"device": "cpu"}}, "here the two share none"),
        (2, {**TAUGHT, "teacher_gpu_ids": [0]}, "here the two share none"),
    ],
)
def test_a_server_that_shares_no_gpu_with_the_trainer_has_no_reason_to_sleep(
    num_gpus: int, changes: dict[str, Any], message: str
) -> None:
    config = RLConfig.model_validate(SLEEPING | changes)
    with pytest.raises(ConfigError, match=f"{message}: remove it, or give inference_gpu_ids and trainer_gpu_ids the same ids"):
        require_shared_gpu(config, share_gpus(config, tuple(map(str, range(num_gpus)))))


def check(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(gpus=tuple(map(str, range(num_gpus))), num_cpus=2)
    monkeypatch.setattr(run, "inspect_machine", lambda: machine)
    run.check(RLConfig.model_validate(SLEEPING))


def test_a_server_that_shares_no_gpu_is_refused_before_anything_of_the_last_run_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="here the two share none"):
        check(2, monkeypatch)


def test_the_memory_of_a_shared_gpu_is_shown_before_a_run_begins_and_by_a_dry_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(1, monkeypatch)
    assert "memory of GPU 0: server 0.5 in turn with trainer 0.92 + 0.08 for contexts" in capsys.readouterr().err
