"""Takes one optimizer step on a batch's rows. Called by the RL loop and by supervised fine-tuning, on every rank alike.

Loss and gradient do not depend on packing, row order or the number of ranks: the divisors are counts over
all rows of the batch.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.autograd.graph import increment_version

from trivet.errors import BatchError, Diverged
from trivet.faults import reach
from trivet.key_names import key_name, list_keys
from trivet.trainer.cpu import Lanes
from trivet.trainer.device_copies import local_part, read_numbers, read_values
from trivet.trainer.failures import (
    RowOutcome,
    describe_gradients,
    describe_remedy,
    describe_rows,
    explaining_memory,
    explaining_update_memory,
)
from trivet.trainer.losses.choice import CovLossConfig, mark_chosen
from trivet.trainer.losses.terms import Loss, LossUnit, RowLoss
from trivet.trainer.measurement.performance import model_cost
from trivet.trainer.model.policy_model import PolicyModel, set_last_row
from trivet.trainer.model.reference import Reference
from trivet.trainer.optim.optimizer import LearningRate, clip_gradients, gradient_norm
from trivet.trainer.ranks.world import World, gather_values, sum_over_ranks
from trivet.trainer.rows import RowPlan, RowTensors, plan_rows
from trivet.wire.batches import MicroBatch
from trivet.wire.versions import Step


@dataclass(slots=True, kw_only=True)
class Learner:
    """The model, optimizer and schedule of one rank. `trainer.checkpoint.state` saves and loads their state."""

    model: PolicyModel
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    loss: Loss
    max_norm: float | None
    """Gradients with a larger norm are scaled down to this one; None: no clipping."""
    world: World
    micro_batch_tokens: int | None = None
    """Pack the samples of a batch again, into rows of at most this many tokens. None: keep the rows of the batch."""
    key_prefix: str = ""
    """Start of the trainer's configuration keys in messages: `trainer.` in a run of `rl`, else empty."""
    reference: Reference | None = None
    """The frozen policy whose log-probabilities the loss compares with the model's. None when the loss needs no such policy."""
    choice: CovLossConfig | None = None
    """The loss that treats some tokens of the step differently (`trainer.losses.choice`). None for any other loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one optimizer step."""

    loss: float
    grad_norm: float
    """Norm of the gradients over all ranks, before clipping."""
    lr: float
    values: dict[str, np.ndarray]
    """Per-token and per-sample values by metric name. Rank 0 has the values of all ranks, any other rank has its own."""
    num_computed_tokens: int
    """Tokens that all ranks computed: fewer than the batch has where samples share prefixes."""
    flops: float
    """Operations that these tokens need, forward and backward, by `ModelCost.flops`."""
    forward_backward_s: float
    """Seconds until the loss and the norm of the gradients are known."""
    optimizer_s: float
    """Seconds of the update, and of the copy of the values to main memory."""
    logprobs: list[torch.Tensor]
    """Log-probabilities of the loss tokens of this rank's rows, before the update. On the device."""


def train_step(
    learner: Learner, rows: Sequence[MicroBatch], *, step: Step, proximal: Sequence[torch.Tensor] = ()
) -> StepResult:
    """Run forward and backward of the whole batch `rows`, the same on every rank, then update the parameters once. Collective.

    Args:
        proximal: `StepResult.logprobs` of the first update on these rows; empty at that update.

    Raises:
        BatchError: no row has a loss token.
        Diverged: loss or gradient norm is NaN or infinite; the parameters are as before.
        OutOfMemory: a row, or the update, does not fit into memory.
    """
    started = time.monotonic()
    world, model = learner.world, learner.model
    learner.optimizer.zero_grad(set_to_none=True)
    counts = count_units(rows)
    if counts[LossUnit.TOKEN] == 0:
        raise BatchError(
            f"batch {step} has {len(rows)} rows and no token to train on: every completion is empty or cut at "
            f"{key_name('seq_len')}; look at rollouts/ and raise {list_keys('seq_len', 'orchestrator.sampling.max_tokens')}"
        )
    plan = plan_step(model, rows, num_ranks=world.num_row_groups, micro_batch_tokens=learner.micro_batch_tokens)
    own_rows = plan.take(world.row_group, device=world.device)
    if learner.reference is not None:
        own_rows = learner.reference.score(model, own_rows)
    if learner.choice is not None:
        own_rows = mark_chosen(learner.choice, rows, own_rows)
    for index, logprobs_N in enumerate(proximal):  # dummies are the last rows
        own_rows[index] = replace(own_rows[index], proximal_logprobs_N=logprobs_N)
    outcomes = _accumulate(learner, own_rows, max_tokens=plan.max_tokens, counts=counts)
    logprobs = [outcome.logprobs_N for outcome in outcomes]
    if not world.reports_rows:
        outcomes = []  # another rank, which computed the same rows, reports them
    own_loss = torch.zeros((), dtype=torch.float64, device=world.device)
    for outcome in outcomes:
        own_loss += outcome.share
    gradients = [local_part(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    # The host waits for the device before the update, because parameters that a NaN has reached could not be restored.
    loss, norm = read_numbers(sum_over_ranks(world, own_loss), gradient_norm(gradients, world))
    computed_at = time.monotonic()
    if not np.isfinite(loss):
        raise _diverged("loss", loss, learner, rows, step=step, where=describe_rows(outcomes, world))
    if not np.isfinite(norm):
        where = describe_gradients(model.named_parameters(), world)
        raise _diverged("gradient norm", norm, learner, rows, step=step, where=where)
    values_by_row = [outcome.values for outcome in outcomes]
    del outcomes, own_rows  # the update needs the memory of the rows
    clip_gradients(gradients, norm=norm, max_norm=learner.max_norm)
    lr = learner.learning_rate.at(step)
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    reach("optimizer_step.during", step=step)  # a fault point: tests may stop or kill the process here
    with explaining_update_memory(key_prefix=learner.key_prefix):
        learner.optimizer.step()
    # `MasterCasts` casts a weight anew when the weight's version counter has changed. Fused and foreach optimizers do not raise
    # that counter.
    increment_version(model.trained_parameters)
    values = read_values(values_by_row) | model.routing.take_shares(world)  # the host waits for the device once more
    return StepResult(
        loss=loss,
        grad_norm=norm,
        lr=lr,
        values=gather_values(world, values),
        num_computed_tokens=plan.num_tokens,
        flops=plan.cost,
        forward_backward_s=computed_at - started,
        optimizer_s=time.monotonic() - computed_at,
        logprobs=logprobs,
    )


def count_units(rows: Sequence[MicroBatch]) -> dict[LossUnit, int]:
    """Return the divisors of a step's loss terms."""
    masks = [mask_T for row in rows for mask_T in row.split(row.loss_mask_T)]
    return {
        LossUnit.TOKEN: sum(int(np.count_nonzero(mask_T)) for mask_T in masks),
        LossUnit.SAMPLE: sum(bool(mask_T.any()) for mask_T in masks),
    }


def plan_step(
    model: PolicyModel, rows: Sequence[MicroBatch], *, num_ranks: int = 1, micro_batch_tokens: int | None = None
) -> RowPlan:
    """Decide which samples of a step share a row, and which rank computes it."""
    row_limit = micro_batch_tokens or max(row.num_tokens for row in rows)
    return plan_rows(
        rows,
        num_ranks=num_ranks,
        cost=model_cost(model).flops,
        max_tokens=micro_batch_tokens if model.lanes.count == 1 else model.lanes.max_tokens(row_limit),
        max_shared_tokens=micro_batch_tokens or max(row_limit, model.seq_len),
        shares_prefixes=model.shares_prefixes,
        packs=model.packs,
    )


def share_of_step(row_loss: RowLoss, counts: Mapping[LossUnit, int]) -> torch.Tensor:
    """Return what a row adds to the step's loss, with gradient."""
    return torch.stack([term / counts[unit] for unit, term in row_loss.terms.items()]).sum()


def _accumulate(
    learner: Learner, rows: Sequence[RowTensors], *, max_tokens: int, counts: Mapping[LossUnit, int]
) -> list[RowOutcome]:
    """Add the gradients of the step's loss to the parameters; return the outcome of each row that is no dummy.

    Args:
        max_tokens: the limit of a row that a lane computes (`RowPlan.max_tokens`). Longer rows come first in `rows`.
        counts: divisors of the loss terms, over all rows of the batch.
    """
    model = learner.model

    def compute(index: int) -> RowOutcome | None:
        row = rows[index]
        set_last_row(model, is_last=index == len(rows) - 1, world=learner.world)
        with explaining_memory(row, chunk_size=model.chunk_size, key_prefix=learner.key_prefix):
            scores = model(row)
            if row.is_dummy:  # it takes part in the collectives with gradient 0
                (scores.logprobs_N.sum() * 0.0).backward()
                return None
            row_loss = learner.loss(scores, row)
            share = share_of_step(row_loss, counts)
            share.backward()
        return RowOutcome(row=row, logprobs_N=scores.logprobs_N.detach(), share=share.detach(), values=row_loss.values)

    num_long = sum(row.num_tokens > max_tokens for row in rows)  # a long row is computed alone, with all cores
    # The model replays the experts of one row at a time.
    lanes = Lanes() if any(row.experts_ULK is not None for row in rows) else model.lanes
    outcomes = [compute(index) for index in range(num_long)] + lanes.map(compute, range(num_long, len(rows)))
    return [outcome for outcome in outcomes if outcome is not None]


def _diverged(name: str, value: float, learner: Learner, rows: Sequence[MicroBatch], *, step: Step, where: str) -> Diverged:
    advice = describe_remedy(rows, key_prefix=learner.key_prefix)
    return Diverged(f"the {name} of step {step} is {value} ({where}); the weights of step {step - 1} are untouched. {advice}")
