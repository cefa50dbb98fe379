import logging
from pathlib import Path

import pytest

from trivet.checkpoints.settings import DATA_FILE, DataRecord, compare_data, write_data_record
from trivet.errors import CheckpointError, ResumeError
from trivet.wire.versions import Step

BEFORE = {"environment 'a'": DataRecord(num_records=60, digest="one")}


def compare(part: Path, records: dict[str, DataRecord], *, strict_key: str | None = None) -> None:
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
        compare(tmp_path, {"environment 'a'": record})
    assert f"environment 'a': the data are not those of checkpoint step_4 ({said})" in caplog.text
    with pytest.raises(ResumeError, match=r"orchestrator\.strict_data = true refuses"):
        compare(tmp_path, {"environment 'a'": record}, strict_key="orchestrator.strict_data")


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
    compare(tmp_path, records, strict_key="strict_data")
    assert caplog.text == ""


def test_a_part_without_a_record_is_not_compared_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    compare(tmp_path, BEFORE, strict_key="strict_data")
    (tmp_path / DATA_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"data\.json cannot be read"):
        compare(tmp_path, BEFORE)
