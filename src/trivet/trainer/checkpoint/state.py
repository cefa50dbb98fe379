"""Gathers and loads the state of the trainer part: model, optimizer, random state and progress.

Called by `trainer.session` and `trainer.open_session`. Shards fit any number of ranks. Only trained weights are saved:
with an adapter the frozen weights are those of model.name. Learning rates are a function of the step, so the only state of the
schedule is the step at which it began.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
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
from trivet.trainer.checkpoint.shard_reader import METADATA_FILE, ShardPlanner, ShardReader, read_metadata
from trivet.trainer.model.policy_model import PolicyModel, has_adapter
from trivet.trainer.step import Learner

logger = logging.getLogger(__name__)
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized, assuming the intent")

State = dict[str, Any]

_CUDA_RANDOM = "random_cuda"
"""Key of the GPU's random state, of which dropout draws there. A checkpoint that was written on a CPU has none."""


class TrainerProgress(msgspec.Struct, kw_only=True):
    """The trainer's totals since step 0, over all resumes."""

    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0
    schedule_start: int = 0
    """The step after which the learning-rate schedule began."""
    data_start: int = 0
    """The step after which supervised data was read from its beginning."""


def state_of(learner: Learner, progress: TrainerProgress) -> State:
    """Return the state to save at this moment. Its tensors are the learner's own, not copies. Collective."""
    model, optimizer = get_state_dict(learner.model, learner.optimizer)
    return {"model": _own(learner.model, model), "optimizer": optimizer} | _progress_state(learner, progress)


def _progress_state(learner: Learner, progress: TrainerProgress) -> State:
    # One random state for all ranks: they are seeded alike, and a resume may have another number of them.
    state = {"random": torch.get_rng_state(), "progress": msgspec.to_builtins(progress)}
    if learner.world.device.type == "cuda":
        state[_CUDA_RANDOM] = torch.cuda.get_rng_state(learner.world.device)
    return state


def load_part(directory: Path, learner: Learner, *, skip_optimizer: bool = False) -> TrainerProgress:
    """Restore model, optimizer and random state from `directory`; return the saved progress. Collective.

    Args:
        skip_optimizer: leave the optimizer as it is.
    """
    progress = TrainerProgress()
    if skip_optimizer:  # asking a fresh optimizer for its state makes one, which would count a step that was never taken
        model_state = _own(learner.model, get_model_state_dict(learner.model))
        state: State = {"model": model_state} | _progress_state(learner, progress)
    else:
        state = state_of(learner, progress)
    try:
        if _CUDA_RANDOM not in read_metadata(directory / METADATA_FILE).state_dict_metadata:
            state.pop(_CUDA_RANDOM, None)
        without_moments = [] if skip_optimizer else _drop_what_was_not_saved(state["optimizer"]["state"], directory)
        load(state, storage_reader=ShardReader(directory), planner=ShardPlanner(), process_group=learner.world.control)
        if without_moments:
            known = {name for group in state["optimizer"]["param_groups"] for name in group["params"]}
            if unknown := [name for name in without_moments if name not in known]:
                raise ValueError(f"the optimizer that was saved has no parameter {unknown[0]!r}")
            logger.info("the optimizer had no state yet of parameters=%s", len(without_moments))
    except (CheckpointException, OSError, RuntimeError, ValueError) as exc:
        raise CheckpointError(
            f"{directory} does not fit model.name and optim of this run, or is damaged: {exc}; resume with the configuration "
            "that wrote it, or from another step"
        ) from exc
    # All that was asked for is there. Frozen weights were not asked for, nor moments of parameters without a gradient.
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


def _drop_what_was_not_saved(moments: State, directory: Path) -> list[str]:
    """Remove from `moments` the parameters of which `directory` has none, and return their names.

    An optimizer makes moments with a parameter's first gradient, and plain SGD makes none.
    """
    keys = read_metadata(directory / METADATA_FILE).state_dict_metadata
    saved = {key.rpartition(".")[0] for key in keys}
    dropped = [name for name in moments if f"optimizer.state.{name}" not in saved]
    for name in dropped:
        del moments[name]
    return dropped


def _own(model: PolicyModel, tensors: State) -> State:
    """Return each tensor once, tied ones under their first name; with an adapter only what is trained."""
    if has_adapter(model.causal_lm):
        names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    else:
        names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name in names}


def progress_to_resume(progress: TrainerProgress, ckpt: CkptConfig) -> TrainerProgress:
    """Return `progress` of the checkpoint resumed from, without what `ckpt` says to leave behind."""
    step = progress.step
    return TrainerProgress(
        step=step,
        total_tokens=0 if ckpt.skip_progress else progress.total_tokens,
        total_samples=0 if ckpt.skip_progress else progress.total_samples,
        schedule_start=step if ckpt.skip_scheduler else progress.schedule_start,
        data_start=step if ckpt.skip_dataloader else progress.data_start,
    )
