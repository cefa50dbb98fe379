"""The trainer's half of a checkpoint: model, optimizer, random state and progress, in shards that fit any number of ranks.

Learning rates are a function of the step, so the schedule has no state of its own.
"""

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trivet.errors import CheckpointError
from trivet.trainer.step import Learner


class Progress(msgspec.Struct, kw_only=True):
    """What the trainer has done since step 0, resumes included."""

    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0


def save_half(directory: Path, learner: Learner, progress: Progress) -> None:
    """Collective: every rank writes its shards into `directory`, which exists."""
    state = _state(learner) | {"progress": msgspec.to_builtins(progress)}
    save(state, checkpoint_id=directory, process_group=learner.world.control)


def load_half(directory: Path, learner: Learner) -> Progress:
    """Collective: bring model, optimizer and random state to where `directory` was written.

    Raises:
        CheckpointError: it does not fit this model, or a part is missing.
    """
    state = _state(learner) | {"progress": msgspec.to_builtins(Progress())}
    try:
        load(state, checkpoint_id=directory, process_group=learner.world.control)
    except (CheckpointException, OSError, RuntimeError, ValueError) as exc:
        raise CheckpointError(
            f"{directory} does not fit model.name and optim of this run, or is damaged: {exc}; resume with the configuration "
            "that wrote it, or from another step"
        ) from exc
    set_state_dict(learner.model, learner.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.set_rng_state(state["random"])
    return msgspec.convert(state["progress"], Progress)


def _state(learner: Learner) -> dict[str, Any]:
    model, optimizer = get_state_dict(learner.model, learner.optimizer)
    # One random state for all ranks: they are seeded alike, and a resume may have another number of them.
    return {"model": model, "optimizer": optimizer, "random": torch.get_rng_state()}
