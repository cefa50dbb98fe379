"""Gathers and loads the state of the trainer part: model, optimizer, random state and progress.

Called by `trainer.session` and `trainer.open_session`. Shards fit any number of ranks. Only trained weights are saved:
with an adapter, a resume reads the frozen weights from model.name. Learning rates are a function of the step, so the only state of
the schedule is the step at which it began.

Nothing in a checkpoint is executed. `torch.distributed.checkpoint` unpickles `.metadata`, and loads everything but tensors with
`weights_only=False`, so a forged file could run code. Here the unpickler admits only the classes of the format of `.metadata`, and
everything in the shards is loaded with `weights_only=True`.
"""

import io
import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from trivet.config.schema.shared import CkptConfig
from trivet.errors import CheckpointError
from trivet.trainer.model.policy_model import PolicyModel, has_adapter
from trivet.trainer.step import Learner

logger = logging.getLogger(__name__)
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized, assuming the intent")

METADATA_FILE = ".metadata"
_ALLOWED_CLASSES = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "_MEM_FORMAT_ENCODING",
                "MetadataIndex",
                "StorageMeta",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # its name in Python 3.13
    }
)
"""The classes that torch 2.11 to 2.13 write into `.metadata`, besides dtypes."""

State = dict[str, Any]

_CUDA_RANDOM = "random_cuda"
"""Key of the random state from which dropout on a GPU draws. A checkpoint that was written on a CPU has none."""


class TrainerProgress(msgspec.Struct, kw_only=True):
    """The trainer's totals since step 0, over all resumes."""

    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0
    schedule_start: int = 0
    """The step after which the learning-rate schedule began."""
    data_start: int = 0
    """The step after which supervised data was read from its beginning."""


def collect_state(learner: Learner, progress: TrainerProgress) -> State:
    """Return the state to save at this moment. Its tensors are the learner's own, not copies. Collective."""
    model, optimizer = get_state_dict(learner.model, learner.optimizer)
    return {"model": _select_saved(learner.model, model), "optimizer": optimizer} | _progress_state(learner, progress)


def _progress_state(learner: Learner, progress: TrainerProgress) -> State:
    # One random state for all ranks: they are seeded alike, and a resume may have another number of them.
    state = {"random": torch.get_rng_state(), "progress": msgspec.to_builtins(progress)}
    if learner.world.device.type == "cuda":
        state[_CUDA_RANDOM] = torch.cuda.get_rng_state(learner.world.device)
    return state


def load_part(directory: Path, learner: Learner, *, skip_optimizer: bool = False) -> TrainerProgress:
    """Restore the learner's state from `directory`, the optimizer's only if it is not skipped; return the progress. Collective."""
    progress = TrainerProgress()
    if skip_optimizer:  # `get_state_dict` would take an empty step, to make the optimizer's state, and that step would count
        model_state = _select_saved(learner.model, get_model_state_dict(learner.model))
        state: State = {"model": model_state} | _progress_state(learner, progress)
    else:
        state = collect_state(learner, progress)
    try:
        metadata = read_metadata(directory / METADATA_FILE)
        if _CUDA_RANDOM not in metadata.state_dict_metadata:
            state.pop(_CUDA_RANDOM, None)
        unsaved = [] if skip_optimizer else _drop_unsaved_moments(state["optimizer"]["state"], metadata)
        reader = _ShardReader(directory, metadata)
        load(state, storage_reader=reader, planner=_ShardPlanner(), process_group=learner.world.control)
        if unsaved:
            saved_names = {name for group in state["optimizer"]["param_groups"] for name in group["params"]}
            if unknown := [name for name in unsaved if name not in saved_names]:
                raise ValueError(f"the optimizer that was saved has no parameter {unknown[0]!r}")
            logger.info("the optimizer had no state yet of parameters=%s", len(unsaved))
    except (CheckpointException, OSError, RuntimeError, ValueError) as exc:
        raise CheckpointError(
            f"{directory} does not fit model.name and optim of this run, or is damaged: {exc}; resume with the configuration "
            "that wrote it, or from another step"
        ) from exc
    # `load` has raised an error if anything was missing. Not strict, because frozen weights and unsaved moments are left out.
    options = StateDictOptions(strict=False)
    if skip_optimizer:
        set_model_state_dict(learner.model, state["model"], options=options)
    else:
        set_state_dict(
            learner.model,
            learner.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )
    torch.set_rng_state(state["random"])
    if _CUDA_RANDOM in state:
        torch.cuda.set_rng_state(state[_CUDA_RANDOM], learner.world.device)
    return msgspec.convert(state["progress"], TrainerProgress)


def _drop_unsaved_moments(moments: State, metadata: Metadata) -> list[str]:
    """Remove from `moments` the parameters whose moments are not in the checkpoint, and return their names.

    A parameter has no moments before its first gradient.
    """
    saved = {key.rpartition(".")[0] for key in metadata.state_dict_metadata}
    dropped = [name for name in moments if f"optimizer.state.{name}" not in saved]
    for name in dropped:
        del moments[name]
    return dropped


def _select_saved(model: PolicyModel, tensors: State) -> State:
    """Return the tensors that a checkpoint has: a tied tensor once, under its first name; with an adapter only trained tensors."""
    if has_adapter(model.causal_lm):
        names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    else:
        names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name in names}


def progress_to_resume(progress: TrainerProgress, ckpt: CkptConfig) -> TrainerProgress:
    """Return the progress with which a resume starts: that of the checkpoint, except where the skip keys of `ckpt` reset it."""
    step = progress.step
    return TrainerProgress(
        step=step,
        total_tokens=0 if ckpt.skip_progress else progress.total_tokens,
        total_samples=0 if ckpt.skip_progress else progress.total_samples,
        schedule_start=step if ckpt.skip_scheduler else progress.schedule_start,
        data_start=step if ckpt.skip_dataloader else progress.data_start,
    )


def read_metadata(path: Path) -> Metadata:
    """Read a `.metadata` file without running code in it."""
    try:
        with path.open("rb") as file:
            metadata = _RestrictedUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        names = {str(place.relative_path) for place in (metadata.storage_data or {}).values()}
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror}; the checkpoint is damaged, resume from another") from exc
    except Exception as exc:
        raise CheckpointError(
            f"{path} is not the metadata of a checkpoint: {exc}; nothing of it was executed. Resume from another checkpoint"
        ) from exc
    if foreign := sorted(name for name in names if Path(name).name != name):
        raise CheckpointError(f"{path} names {foreign[0]!r}, which lies outside its directory; resume from another checkpoint")
    return metadata


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if not is_dtype and (module_name, global_name) not in _ALLOWED_CLASSES:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which no checkpoint needs")
        return super().find_class(module_name, global_name)


class _ShardReader(FileSystemReader):
    """A `FileSystemReader` that unpickles nothing, because it gets the metadata that `read_metadata` has read."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata."""
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class _ShardPlanner(DefaultLoadPlanner):
    """A `DefaultLoadPlanner` that accepts plain values, but no objects, where an entry is not a tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an entry that is not a tensor; refuse it if it holds anything but plain values."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
