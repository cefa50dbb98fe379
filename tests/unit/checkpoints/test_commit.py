import json

import pytest

from trivet.checkpoints.commit import (
    DONE,
    ORCHESTRATOR,
    PARTS,
    TRAINER,
    begin_part,
    commit,
    committed_steps,
    discard_checkpoints_after,
    discard_staging,
    finish_part,
    removable_steps,
    resolve_resume_step,
    staging_directory,
    verify_checkpoint,
)
from trivet.config.layout import COMMITTED, RunLayout
from trivet.errors import CheckpointError
from trivet.storage.durable import FileRecord


@pytest.fixture
def layout(tmp_path):
    return RunLayout(tmp_path)


def write_part(layout, step, name, content=b"state"):
    part = begin_part(layout, step, name)
    (part / "nested").mkdir()
    (part / "nested" / ".metadata").write_bytes(content)
    (part / "data.bin").write_bytes(content * 2)
    finish_part(layout, step, name)


def write_checkpoint(layout, step):
    for name in (ORCHESTRATOR, TRAINER):
        write_part(layout, step, name)
    return commit(layout, step, clock=lambda: 12.0)


def test_a_checkpoint_of_both_parts_is_committed_and_verified(layout):
    record = write_checkpoint(layout, 5)
    assert record.step == 5
    assert record.time == 12.0
    assert verify_checkpoint(layout, 5) == record
    assert committed_steps(layout) == [5]
    assert sorted(path.name for path in layout.checkpoint_step(5).iterdir()) == sorted([COMMITTED, TRAINER, ORCHESTRATOR])
    assert not staging_directory(layout, 5).exists()


def test_a_step_is_committed_once_and_again_after_a_crash_between_rename_and_marker(layout):
    write_checkpoint(layout, 5)
    for name in PARTS:
        write_part(layout, 5, name)
    with pytest.raises(CheckpointError, match="committed already"):
        commit(layout, 5)
    (layout.checkpoint_step(5) / COMMITTED).unlink()
    assert committed_steps(layout) == []
    commit(layout, 5)
    assert committed_steps(layout) == [5]


def test_a_part_that_is_begun_again_is_empty_and_not_done_and_the_other_stays(layout):
    write_part(layout, 5, ORCHESTRATOR)
    begin_part(layout, 5, TRAINER)
    assert (staging_directory(layout, 5) / ORCHESTRATOR / DONE).exists()
    assert list(begin_part(layout, 5, ORCHESTRATOR).iterdir()) == []
    for step in (5, 6):
        with pytest.raises(CheckpointError, match="holds no files"):
            finish_part(layout, step, TRAINER)


@pytest.mark.parametrize("missing", PARTS)
def test_one_part_alone_is_no_checkpoint(layout, missing):
    (present,) = set(PARTS) - {missing}
    write_part(layout, 5, present)
    begin_part(layout, 5, missing)
    with pytest.raises(CheckpointError, match=f"lacks the part of the {missing}"):
        commit(layout, 5)
    assert committed_steps(layout) == []


def test_resume_takes_the_named_or_the_newest_step(layout):
    with pytest.raises(CheckpointError, match=r"holds no committed checkpoint; leave ckpt.resume_step out"):
        resolve_resume_step(layout, -1)
    for step in (2, 10, 4):
        write_checkpoint(layout, step)
    assert resolve_resume_step(layout, -1) == 10
    assert resolve_resume_step(layout, 4) == 4
    with pytest.raises(CheckpointError, match=r"resume_step = 3 .* there are 2, 4, 10; take one of these, or -1"):
        resolve_resume_step(layout, 3)


def test_going_back_removes_later_and_uncommitted_steps(layout):
    discard_checkpoints_after(layout, 0)
    discard_staging(layout)
    assert not layout.checkpoints.exists()
    for step in (2, 4, 6):
        write_checkpoint(layout, step)
    write_part(layout, 8, ORCHESTRATOR)
    (layout.checkpoint_step(2) / COMMITTED).unlink()
    discard_checkpoints_after(layout, 4)
    assert (staging_directory(layout, 8) / ORCHESTRATOR / DONE).exists(), "the other role may be writing it"
    discard_staging(layout)
    assert [path.name for path in layout.checkpoints.iterdir()] == ["step_4"]
    verify_checkpoint(layout, 4)


def relist(layout, part):
    """Rewrite a part after the commit. Its own listing agrees with it, COMMITTED does not."""
    for name in PARTS:
        write_part(layout, 99, name, b"other")
    target = layout.checkpoint_step(5) / part
    for path in (staging_directory(layout, 99) / part).rglob("*"):
        if path.is_file():
            (target / path.relative_to(staging_directory(layout, 99) / part)).write_bytes(path.read_bytes())


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda part: (part / "nested" / ".metadata").unlink(), r"nested/\.metadata is missing"),
        (lambda part: (part / "data.bin").write_bytes(b""), "data.bin has 0 bytes; 10"),
        (lambda part: (part / "data.bin").write_bytes(b"statestatE"), "data.bin does not match"),
        (lambda part: (part / DONE).unlink(), "has no DONE"),
        (lambda part: (part / DONE).write_text("{"), "cannot be read"),
        (lambda part: (part.parent / COMMITTED).unlink(), "never committed"),
        *(
            (lambda part, content=content: (part.parent / COMMITTED).write_bytes(content), "cannot be read")
            for content in (b"", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"step": 5}')
        ),
        (lambda part: relist(RunLayout(part.parents[2]), part.name), "its listing was altered"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_file_named(layout, part, damage, expected):
    write_checkpoint(layout, 5)
    damage(layout.checkpoint_step(5) / part)
    with pytest.raises(CheckpointError, match=expected):
        verify_checkpoint(layout, 5)


def test_what_was_digested_while_it_was_written_is_not_read_again_but_refused_when_it_differs(layout):
    for name in PARTS:
        part = begin_part(layout, 5, name)
        (part / "data.bin").write_bytes(b"state")
        (part / "other").write_bytes(b"x")
        listing = finish_part(layout, 5, name, written={"data.bin": FileRecord(5, "0" * 32)})
        assert listing.files["data.bin"].xxh3_128 == "0" * 32
        assert sorted(listing.files) == ["data.bin", "other"]
    commit(layout, 5)
    with pytest.raises(CheckpointError, match=r"data\.bin does not match"):
        verify_checkpoint(layout, 5)


@pytest.mark.parametrize(("content", "found"), [(None, "no such file"), (b"stat", "4 bytes")])
def test_what_another_machine_wrote_must_have_arrived(layout, content, found):
    part = begin_part(layout, 5, TRAINER)
    (part / "other").write_bytes(b"x")
    if content is not None:
        (part / "data.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"was written with 5 bytes and has {found} here: output_dir must be one"):
        finish_part(layout, 5, TRAINER, written={"data.bin": FileRecord(5, "0" * 32)})
    assert not (staging_directory(layout, 5) / TRAINER / DONE).exists()


def test_the_record_of_another_step_is_refused(layout):
    for step in (4, 5):
        write_checkpoint(layout, step)
    damaged = layout.checkpoint_step(5)
    (damaged / TRAINER / "data.bin").write_bytes(b"damaged!")
    (damaged / COMMITTED).write_bytes((layout.checkpoint_step(4) / COMMITTED).read_bytes())
    with pytest.raises(CheckpointError, match="is the record of step 4, not of step 5: it was copied"):
        verify_checkpoint(layout, 5)


@pytest.mark.parametrize("parts", [[], [ORCHESTRATOR], [TRAINER]])
def test_a_record_without_a_part_that_lies_there_is_refused(layout, parts):
    write_checkpoint(layout, 5)
    path = layout.checkpoint_step(5) / COMMITTED
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"parts": {name: record["parts"][name] for name in parts}}))
    with pytest.raises(CheckpointError, match="every part that was committed must be there"):
        verify_checkpoint(layout, 5)


@pytest.mark.parametrize(
    ("keep_last", "keep_interval", "expected"),
    [
        (None, None, []),
        (2, None, [10, 20, 30]),
        (1, 20, [10, 30]),
        (None, 20, [10, 30]),
        (None, 7, [10, 20, 30, 40]),
        (9, None, []),
    ],
)
def test_the_newest_and_the_multiples_stay(keep_last, keep_interval, expected):
    assert removable_steps([10, 20, 30, 40, 50], keep_last=keep_last, keep_interval=keep_interval) == expected
