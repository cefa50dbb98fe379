import logging
from pathlib import Path

import pytest

from trivet.checkpoints.settings import (
    DATA_FILE,
    MAY_CHANGE,
    DataRecord,
    compare_data,
    find_changes,
    flatten,
    require_same_settings,
    write_data_record,
    write_settings,
)
from trivet.config.keys import find_key
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.shared import CkptConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import CheckpointError, ResumeError
from trivet.wire.versions import Step

BEFORE = {"environment 'a'": DataRecord(num_records=60, digest="one")}
BASE = {"model": {"name": "m"}, "optim": {"lr": 0.01}}


def trainer(**values: object) -> TrainerConfig:
    return TrainerConfig.model_validate(BASE | values)


def compare(part: Path, saved: TrainerConfig, now: TrainerConfig) -> None:
    write_settings(part, saved)
    require_same_settings(part, now, ckpt=now.ckpt, step=Step(6))


@pytest.mark.parametrize("prefix", MAY_CHANGE)
def test_every_key_that_may_change_exists_in_some_role(prefix: str) -> None:
    assert any(
        find_key(kind, tuple(prefix.replace("*", "0").split("."))) for kind in (TrainerConfig, SftConfig, OrchestratorConfig)
    )


def test_paths_limits_logs_and_the_last_step_may_change(tmp_path: Path) -> None:
    saved = trainer(max_steps=6, output_dir="a", wandb={"project": "p"})
    now = trainer(max_steps=12, output_dir="b", ckpt={"resume_step": -1}, log={"level": "debug"}, device="cpu")
    compare(tmp_path, saved, now)


def test_another_value_is_refused_with_both_and_the_way_to_change_it(tmp_path: Path) -> None:
    part = tmp_path / "trainer"
    part.mkdir()
    with pytest.raises(ResumeError) as caught:
        compare(part, trainer(), trainer(optim={"lr": 0.5}, scheduler={"type": "linear", "warmup_steps": 3}, max_steps=9))
    text = str(caught.value)
    assert "checkpoint step_6 was made by the trainer with other settings" in text
    assert "- optim.lr was 0.01 and is 0.5 now" in text
    assert '- scheduler.type was "constant" and is "linear" now' in text
    assert "- scheduler.warmup_steps was unset and is 3 now" in text
    assert 'ckpt.allow_changes = ["optim.lr", "scheduler.decay_steps", "scheduler.min_lr", "scheduler.type"' in text
    assert "from step 7 on" in text


def test_a_key_that_is_named_may_change_with_all_below_it(tmp_path: Path) -> None:
    compare(tmp_path, trainer(), trainer(optim={"lr": 0.5, "eps": 1e-6}, ckpt={"allow_changes": ["optim"]}))
    compare(tmp_path, trainer(), trainer(optim={"lr": 0.5}, model={"name": "other"}, ckpt={"allow_changes": ["*"]}))


def test_a_key_that_did_not_exist_yet_counts_as_its_default() -> None:
    assert find_changes({}, {"new": 1}, defaults={"new": 1}, allowed=[]) == {}
    assert find_changes({}, {"new": 2}, defaults={"new": 1}, allowed=[]) == {"new": (1, 2)}
    assert find_changes({"gone": 3}, {}, defaults={}, allowed=[]) == {"gone": (3, None)}
    assert find_changes({"optimal": 1}, {"optimal": 2}, defaults={}, allowed=["optim"]) == {"optimal": (1, 2)}


def test_tables_in_a_list_are_told_apart_by_their_place() -> None:
    table = {"env": [{"id": "a"}, {"id": "b", "args": {"n": 1}}], "plain": [1, 2]}
    assert flatten(table) == {"env.0.id": "a", "env.1.id": "b", "env.1.args.n": 1, "plain": [1, 2]}


def test_a_part_without_its_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.toml cannot be read"):
        require_same_settings(tmp_path, trainer(), ckpt=CkptConfig(), step=Step(6))


def compare_records(part: Path, records: dict[str, DataRecord], *, strict_key: str | None = None) -> None:
    compare_data(part, records, step=Step(4), strict_key=strict_key)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (DataRecord(num_records=60, digest="two"), "60 as before, with other contents"),
        (DataRecord(num_records=61, digest="two"), "61 instead of 60"),
    ],
)
def test_other_data_are_said_or_refused(
    tmp_path: Path, record: DataRecord, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_data_record(tmp_path, BEFORE)
    with caplog.at_level(logging.WARNING):
        compare_records(tmp_path, {"environment 'a'": record})
    assert f"environment 'a': the data are not those of checkpoint step_4 ({said})" in caplog.text
    with pytest.raises(ResumeError, match=r"orchestrator\.strict_data = true refuses"):
        compare_records(tmp_path, {"environment 'a'": record}, strict_key="orchestrator.strict_data")


@pytest.mark.parametrize(
    "records",
    [
        BEFORE,
        {},
        BEFORE | {"new": DataRecord(num_records=1, digest="x")},
        {"environment 'a'": DataRecord(num_records=60, digest="")},
    ],
)
def test_the_same_data_and_new_ones_and_unknown_ones_are_not_refused(
    tmp_path: Path, records: dict[str, DataRecord], caplog: pytest.LogCaptureFixture
) -> None:
    write_data_record(tmp_path, BEFORE)
    compare_records(tmp_path, records, strict_key="strict_data")
    assert caplog.text == ""


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / DATA_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"data\.json cannot be read"):
        compare_records(tmp_path, BEFORE)
