"""Keeps the frozen reference policy of `trainer.loss.beta`: this rank's trained shards in main memory.

There is no second model. Before a step the reference's shards replace the model's own, the rows are scored without gradient, and
the model's own shards return. Checkpoints do not hold the reference: a resume reads it from weights/step_N, or from the start
model.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from trivet.config.layout import RunLayout
from trivet.config.schema.losses import PolicyLossConfig
from trivet.config.schema.model import TrainerModelConfig
from trivet.errors import CheckpointError, WeightsError
from trivet.trainer.device_copies import copy_to_host, local_part
from trivet.trainer.model.policy_model import PolicyModel, load_policy, scoring
from trivet.trainer.ranks.world import World
from trivet.trainer.rows import RowTensors
from trivet.weights.manifest import verify
from trivet.weights.retention import reference_version_after
from trivet.wire.versions import START_VERSION, PolicyVersion, Step

logger = logging.getLogger(__name__)


class Reference:
    """The shards of an earlier policy."""

    def __init__(self, model: PolicyModel) -> None:
        """Copy `model` as it is now."""
        self._shards = _host_copies(model)

    def follow(self, model: PolicyModel) -> None:
        """Replace the reference by `model` as it is now."""
        for shard, parameter in zip(self._shards, model.trained_parameters, strict=True):
            shard.copy_(local_part(parameter.detach()), non_blocking=True)

    def score(self, model: PolicyModel, rows: Sequence[RowTensors]) -> list[RowTensors]:
        """Return `rows` with the reference's log-probabilities of their loss tokens. Collective."""
        trained_shards = _host_copies(model)
        are_off_loaded = any(parameter.device.type == "cpu" for parameter in model.trained_parameters)
        _copy_into(model, self._shards)
        try:
            with scoring(model):  # at its end it frees the gathered parameters, which are those of the reference
                return [replace(row, reference_logprobs_N=model(row).logprobs_N) for row in rows]
        finally:
            # A GPU may still read an off-loaded shard. Shards on the GPU need no wait: copies there follow earlier reads.
            if are_off_loaded and torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
            _copy_into(model, trained_shards)


def _copy_into(model: PolicyModel, shards: Sequence[torch.Tensor]) -> None:
    for shard, parameter in zip(shards, model.trained_parameters, strict=True):
        local_part(parameter.detach()).copy_(shard, non_blocking=True)


def open_reference(
    loss: PolicyLossConfig,
    model: PolicyModel,
    *,
    config: TrainerModelConfig,
    layout: RunLayout,
    from_step: Step,
    world: World,
) -> Reference | None:
    """Return the reference of a run that starts from `from_step` with `model`; None when the loss needs none. Collective."""
    if not loss.beta:
        return None
    version = reference_version_after(from_step, interval=loss.reference_update_interval)
    logger.info("reference policy version=%s beta=%s", version, loss.beta)
    if version == from_step:
        return Reference(model)
    try:
        return Reference(load_published(config, world, layout=layout, version=version))
    except WeightsError as exc:
        raise CheckpointError(
            f"step {from_step} is compared with policy {version} (trainer.loss.reference_update_interval = "
            f"{loss.reference_update_interval}), which cannot be read: {exc}; resume from a multiple of the interval"
        ) from exc


def load_published(config: TrainerModelConfig, world: World, *, layout: RunLayout, version: PolicyVersion) -> PolicyModel:
    """Load the policy of `version` to score with it: the start model, or what the run published. Collective.

    Raises:
        WeightsError: the policy is not in `weights/`, or its files are not those that were published.
    """
    if version == START_VERSION:
        return _load(config, world)
    directory = layout.weights_step(version)
    verify(directory)
    if config.lora is None:
        return _load(config, world, name=str(directory))
    from trivet.trainer.model.lora import read_adapter

    policy = _load(config, world)
    read_adapter(directory, policy)
    return policy


def _load(config: TrainerModelConfig, world: World, *, name: str | None = None) -> PolicyModel:
    """Load the model `name`, by default the start model, to copy its shards. It needs no dither, because it is never trained."""
    return load_policy(config.model_copy(update={"dither": False, "name": name or config.name}), world)


def _host_copies(model: PolicyModel) -> list[torch.Tensor]:
    """Copy this rank's trained shards to main memory: pinned for those of a GPU, without waiting for it.

    The CPU must not read the result. Only copies on the same stream may use it.
    """
    return [copy_to_host(local_part(parameter.detach())) for parameter in model.trained_parameters]
