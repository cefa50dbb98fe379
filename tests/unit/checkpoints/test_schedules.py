"""A schedule keeps the step at which it ends over every resume."""

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from trivet.checkpoints.commit import ORCHESTRATOR, TRAINER
from trivet.checkpoints.resume import settle_schedules
from trivet.checkpoints.settings import require_same_settings, write_settings
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import ResumeError
from trivet.wire.versions import Step

COSINE, LINEAR = {"scheduler": {"type": "cosine"}}, {"scheduler": {"type": "linear"}}
FALLING = {"temp_scheduler": {"type": "linear", "end_temperature": 0.5}}
ROLES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "trainer, cosine": (TrainerConfig, COSINE, "scheduler.total_steps"),
    "trainer, linear": (TrainerConfig, LINEAR, "scheduler.total_steps"),
    "sft": (SftConfig, COSINE, "scheduler.total_steps"),
    "temperature": (OrchestratorConfig, {"sampling": FALLING}, "sampling.temp_scheduler.total_steps"),
    "temperature of one environment": (
        OrchestratorConfig,
        {"env": [{"id": "a"}, {"id": "b", "sampling": FALLING}]},
        "env.1.sampling.temp_scheduler.total_steps",
    ),
}


@pytest.fixture(params=list(ROLES))
def role(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any], str]:
    return ROLES[request.param]


def part_name(config: Any) -> str:
    return ORCHESTRATOR if isinstance(config, OrchestratorConfig) else TRAINER


def write(config: Any, step: int) -> None:
    part = RunLayout(config.output_dir).checkpoint_step(step) / part_name(config)
    part.mkdir(parents=True)
    write_settings(part, config)


def resume(config: Any, step: int) -> Any:
    """Go through what a role does with its configuration, and commit again."""
    part = RunLayout(config.output_dir).checkpoint_step(step) / part_name(config)
    require_same_settings(part, config, ckpt=config.ckpt, step=Step(step))
    settled = settle_schedules(config, step=Step(step))
    write(settled, step + 1)
    return settled


def length_of(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[int(name)] if isinstance(config, list) else getattr(config, name)
    return config


def set_length(values: dict[str, Any], key: str, length: int) -> dict[str, Any]:
    *path, last = key.split(".")
    values = deepcopy(values)
    table: Any = values
    for name in path:
        table = table[int(name)] if isinstance(table, list) else table[name]
    table[last] = length
    return values


def test_a_schedule_keeps_its_end_over_resumes_with_more_steps(
    role: tuple[Any, dict[str, Any], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, values, key = role
    base = {"output_dir": tmp_path, **values}
    first = settle_schedules(kind.model_validate(base | {"max_steps": 8}), step=Step(0))
    assert length_of(first, key) == 8
    write(first, 4)
    with caplog.at_level(logging.WARNING):
        assert length_of(resume(kind.model_validate(base | {"max_steps": 8}), 4), key) == 8
        assert caplog.text == ""
        assert length_of(resume(kind.model_validate(base | {"max_steps": 16}), 5), key) == 8
    assert f"{key} = 8 is kept from the checkpoint although max_steps is 16 now" in caplog.text
    assert length_of(resume(kind.model_validate(base | {"max_steps": 32}), 6), key) == 8


def test_another_end_is_taken_only_where_it_is_named_and_allowed(role: tuple[Any, dict[str, Any], str], tmp_path: Path) -> None:
    kind, values, key = role
    base = {"output_dir": tmp_path, "max_steps": 16, **set_length(values, key, 16)}
    write(settle_schedules(kind.model_validate({"output_dir": tmp_path, "max_steps": 8, **values}), step=Step(0)), 4)
    with pytest.raises(ResumeError, match=f"{key} was 8 and is 16 now"):
        resume(kind.model_validate(base), 4)
    assert length_of(resume(kind.model_validate(base | {"ckpt": {"allow_changes": [key]}}), 4), key) == 16
    assert length_of(resume(kind.model_validate(base), 5), key) == 16


def test_a_checkpoint_that_names_no_end_had_its_own_max_steps(role: tuple[Any, dict[str, Any], str], tmp_path: Path) -> None:
    kind, values, key = role
    write(kind.model_validate({"output_dir": tmp_path, "max_steps": 8, **values}), 4)
    assert length_of(resume(kind.model_validate({"output_dir": tmp_path, "max_steps": 16, **values}), 4), key) == 8


def test_a_schedule_that_starts_anew_ends_with_the_run(tmp_path: Path) -> None:
    base = {"output_dir": tmp_path, **COSINE}
    write(settle_schedules(TrainerConfig.model_validate(base | {"max_steps": 8}), step=Step(0)), 4)
    anew = resume(TrainerConfig.model_validate(base | {"max_steps": 16, "ckpt": {"skip_scheduler": True}}), 4)
    assert length_of(anew, "scheduler.total_steps") == 16
    assert length_of(resume(TrainerConfig.model_validate(base | {"max_steps": 20}), 5), "scheduler.total_steps") == 16


def test_a_schedule_of_another_type_begins_with_the_resume(tmp_path: Path) -> None:
    write(TrainerConfig.model_validate({"output_dir": tmp_path, "max_steps": 8}), 4)
    changed = {"output_dir": tmp_path, "max_steps": 16, "ckpt": {"allow_changes": ["scheduler"]}, **COSINE}
    assert length_of(resume(TrainerConfig.model_validate(changed), 4), "scheduler.total_steps") == 16


def test_evaluations_that_measure_something_else_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def config(**evals: object) -> OrchestratorConfig:
        return OrchestratorConfig.model_validate({"output_dir": tmp_path, "eval": {"env": [{"id": "a"}], **evals}})

    write(config(), 4)
    with caplog.at_level(logging.WARNING):
        resume(config(interval=7, max_concurrent=3), 4)
        assert caplog.text == ""
        resume(config(interval=7, sampling={"temperature": 0.5}, num_examples=9), 5)
    assert (
        "scores from step 6 on are not comparable with earlier ones: eval.sampling.temperature was 1.0 and is 0.5"
        in caplog.text
    )
    assert "eval.num_examples was -1 and is 9 now" in caplog.text


def test_an_evaluation_that_is_new_is_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(OrchestratorConfig.model_validate({"output_dir": tmp_path}), 4)
    resume(OrchestratorConfig.model_validate({"output_dir": tmp_path, "eval": {"env": [{"id": "a"}]}}), 4)
    assert caplog.text == ""


def test_the_record_that_a_trainer_replays_may_not_change_unseen(tmp_path: Path) -> None:
    def config(replay: str) -> TrainerConfig:
        return TrainerConfig.model_validate({"output_dir": tmp_path, "max_steps": 8, "data": {"replay": replay}})

    write(config("one"), 4)
    with pytest.raises(ResumeError, match=r'data\.replay was "one" and is "two" now'):
        resume(config("two"), 4)
