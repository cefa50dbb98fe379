"""Computes what each token of a trained step added to its loss. Called by `trivet explain`, outside any run.

The losses, the division into rows and the divisors are those of `trainer.step`: there is no second formula here. A step's policy is
the one that it started from, so the log-probabilities are computed anew with `weights/step_N-1`.

Legend: N loss tokens of a row, T tokens of a sample, L those of its tokens that the loss saw.
"""

from collections.abc import Sequence

import numpy as np
import torch

from trivet.algorithms.packing import PackItem, pack
from trivet.config.layout import RunLayout
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import ConfigError, WeightsError
from trivet.trainer.device_copies import Selected
from trivet.trainer.loop import check_batch, use_experts
from trivet.trainer.losses.choice import CovLossConfig, mark_chosen
from trivet.trainer.losses.formulas import make_policy_loss
from trivet.trainer.losses.terms import Loss, LossUnit
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.model.policy_model import PolicyModel, load_policy, scoring
from trivet.trainer.model.reference import load_published, open_reference
from trivet.trainer.ranks.world import World, open_world
from trivet.trainer.rows import RowTensors
from trivet.trainer.step import count_units, plan_step, share_of_step
from trivet.transport.explained import CLIPPING_LOSSES, SampleShares
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.versions import START_VERSION, PolicyVersion, Step

_TIMEOUT_S = 60.0
"""Longest wait of a collective operation. A single rank waits for nobody."""


def share_tokens(config: TrainerConfig, items: Sequence[PackItem], *, step: Step, seq_len: int) -> list[SampleShares | None]:
    """Return the shares of the loss tokens of each item; None for an item without a loss token.

    Args:
        config: of the trainer that took the step; its `output_dir` holds the policies.
        items: every sample of the step.
        seq_len: the tokens to which the orchestrator cut samples.

    Raises:
        ConfigError: the policy that the step started from is gone.
        BatchError: the loss needs a teacher's log-probabilities, and the samples have none.
    """
    config = config.model_copy(update={"model": config.model.model_copy(update={"cp": 1, "ep": 1})})  # of this rank alone
    packed = [(index, row) for index, item in enumerate(items) for row in pack([item], seq_len=seq_len)]
    rows = [row for _, row in packed]
    use_experts(rows, config)
    found: list[SampleShares | None] = [None] * len(items)
    if not rows:
        return found
    with open_world(device=config.device, timeout_s=_TIMEOUT_S) as world:
        model = _load_policy_of(config, step, world)
        check_batch(
            Batch(step=step, purpose=BatchPurpose.TRAIN, micro_batches=rows),
            seq_len=config.model.seq_len,
            vocab_size=model.embedding.num_embeddings,
            needs_teacher=config.loss.needs_teacher,
        )
        layout, loss = RunLayout(config.output_dir), make_policy_loss(config.loss)
        reference = open_reference(
            config.loss, model, config=config.model, layout=layout, from_step=Step(step - 1), world=world
        )
        limit = config.micro_batch_tokens or config.model.seq_len
        planned = plan_step(model, rows, micro_batch_tokens=limit).take(0, device=world.device)
        if reference is not None:
            planned = reference.score(model, planned)
        if isinstance(config.loss, CovLossConfig):
            planned = mark_chosen(config.loss, rows, planned)
        counts = count_units(rows)
        with scoring(model):
            for row in planned:
                columns = share_row(model, loss, row, counts=counts, clips=config.loss.type in CLIPPING_LOSSES)
                ends = np.cumsum(row.num_loss_tokens_S)
                for (row_index, _), end, length in zip(row.sample_indices, ends, row.num_loss_tokens_S, strict=True):
                    index = packed[row_index][0]
                    is_trained_T = items[index].sample.loss_mask_T & (np.arange(items[index].sample.num_tokens) < seq_len)
                    own = {name: values_N[end - length : end] for name, values_N in columns.items()}
                    found[index] = _spread(own, is_trained_T)
    return found


def share_row(
    model: PolicyModel, loss: Loss, row: RowTensors, *, counts: dict[LossUnit, int], clips: bool
) -> dict[str, np.ndarray]:
    """Return the fields of `SampleShares` for the loss tokens of one row, [N]. The model is in `scoring`.

    Args:
        counts: the divisors of the step (`count_units`).
        clips: the loss clips ratios; false: it masks tokens.
    """
    scores = model(row)
    with torch.enable_grad():
        # The loss sees the scores as leaves, so autograd gives its derivative for each token without the model's.
        leaves = TokenScores(scores.logprobs_N.detach().requires_grad_(), scores.entropies_N.detach().requires_grad_())
        row_loss = loss(leaves, row)
        (weights_N,) = torch.autograd.grad(share_of_step(row_loss, counts), [leaves.logprobs_N])
    bounds = ["is_masked", "is_masked_low", "is_masked_high"] if clips else ["is_masked"]
    columns = {
        "logprobs_T": leaves.logprobs_N.detach(),
        "ratios_T": _tokens(row_loss.values["importance_ratio"]),
        "losses_T": torch.stack([part.double() / counts[unit] for unit, part in row_loss.tokens.items()]).sum(dim=0),
        "weights_T": weights_N,
        "is_bounded_T": torch.stack([_tokens(row_loss.values[name]) for name in bounds]).any(dim=0),
    }
    return {name: column_N.cpu().numpy() for name, column_N in columns.items()}


def _spread(columns: dict[str, np.ndarray], is_trained_T: np.ndarray) -> SampleShares:
    """Put the values of a sample's loss tokens at their places among all its tokens."""
    spread: dict[str, np.ndarray] = {}
    for name, values_L in columns.items():
        spread[name] = (
            np.zeros(len(is_trained_T), dtype=np.bool_) if name == "is_bounded_T" else np.full(len(is_trained_T), np.nan)
        )
        spread[name][is_trained_T] = values_L
    return SampleShares(**spread)


def _tokens(values: torch.Tensor | Selected) -> torch.Tensor:
    assert isinstance(values, torch.Tensor), "the metrics of masks and ratios have a value for each token"
    return values


def _load_policy_of(config: TrainerConfig, step: Step, world: World) -> PolicyModel:
    """Load the policy that `step` started from."""
    version = PolicyVersion(step - 1)
    if version == START_VERSION:
        return load_policy(config.model, world)  # with the noise of `model.dither`, as the first step had it
    try:
        return load_published(config.model, world, layout=RunLayout(config.output_dir), version=version)
    except WeightsError as exc:
        raise ConfigError(
            f"step {step} started from policy {version}, which cannot be read: {exc}; a run keeps every policy with "
            "ckpt.weights.interval = 1"
        ) from exc
