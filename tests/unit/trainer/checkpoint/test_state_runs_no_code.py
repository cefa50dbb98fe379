"""Nothing in a checkpoint is executed, neither `.metadata` nor the files of the tensors."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save

from support.shards import write_state
from trivet.errors import CheckpointError
from trivet.trainer.checkpoint.state import METADATA_FILE, TrainerProgress, collect_state, load_part, read_metadata
from trivet.trainer.step import Learner


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def learner(tiny_model: Path, make_learner) -> Learner:
    return make_learner(tiny_model)


@pytest.fixture
def part(learner: Learner, tmp_path: Path) -> Path:
    directory = tmp_path / "trainer"
    directory.mkdir()
    write_state(directory, collect_state(learner, TrainerProgress(step=3)), learner.world)
    return directory


def test_metadata_that_would_run_code_is_refused_and_named(part: Path, learner: Learner, tmp_path: Path) -> None:
    (part / METADATA_FILE).write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    with pytest.raises(CheckpointError, match=r"\.metadata is not the metadata of a checkpoint: it names posix\.mkdir"):
        load_part(part, learner)
    with pytest.raises(CheckpointError, match=r"\.metadata is not the metadata of a checkpoint"):
        load_part(part, learner, skip_optimizer=True)
    assert not (tmp_path / "mark").exists()


def test_code_inside_otherwise_whole_metadata_is_refused(part: Path, tmp_path: Path) -> None:
    metadata = FileSystemReader(part).read_metadata()
    metadata.planner_data = Payload(tmp_path / "mark")
    (part / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
        read_metadata(part / METADATA_FILE)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["builtins.eval", "torch.load", "torch.storage._load_from_bytes", "torch.hub.load"])
def test_only_the_classes_of_the_format_are_admitted(tmp_path: Path, name: str) -> None:
    module, _, function = name.rpartition(".")
    (tmp_path / METADATA_FILE).write_bytes(f"c{module}\n{function}\n.".encode())
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read_metadata(tmp_path / METADATA_FILE)


@pytest.mark.parametrize("content", [b"", b"\x80", b"junk", pickle.dumps({"a": 1}), pickle.dumps([1] * 9)[:-3]])
def test_what_is_no_metadata_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / METADATA_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="is not the metadata of a checkpoint"):
        read_metadata(tmp_path / METADATA_FILE)


def test_a_shard_outside_the_directory_is_refused(part: Path) -> None:
    metadata = FileSystemReader(part).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"
    (part / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"names '\.\./\.\./secret', which lies outside"):
        read_metadata(part / METADATA_FILE)


def test_an_object_beside_the_tensors_is_not_unpickled(part: Path, learner: Learner, tmp_path: Path) -> None:
    state = collect_state(learner, TrainerProgress(step=3))
    state["progress"] = {**state["progress"], "step": Payload(tmp_path / "mark")}
    shutil.rmtree(part)
    save(state, checkpoint_id=part, process_group=learner.world.control)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_part(part, learner)
    assert not (tmp_path / "mark").exists()


def test_a_checkpoint_of_our_own_is_read(part: Path, learner: Learner) -> None:
    assert load_part(part, learner) == TrainerProgress(step=3)
