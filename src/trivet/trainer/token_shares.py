"""Computes what each token of a trained step added to its loss. Called by `trivet explain`, outside any run.

The losses, the division into rows and the divisors are those of `trainer.step`: there is no second formula here. A step's policy is
the one that it started from, so the log-probabilities are computed anew with `weights/step_N-1`.

Legend: N loss tokens of a row, L loss tokens of one sample.
"""

from collections.abc import Sequence

import numpy as np
import torch

from trivet.algorithms.packing import PackItem, pack
from trivet.config.layout import RunLayout
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import ConfigError, WeightsError
from trivet.trainer.device_copies import Selected
from trivet.trainer.loop import check_batch
from trivet.trainer.losses.formulas import make_policy_loss
from trivet.trainer.losses.terms import Loss, LossUnit
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.model.policy_model import PolicyModel, load_policy, scoring
from trivet.trainer.model.reference import load_published, open_reference
from trivet.trainer.ranks.world import World, open_world
from trivet.trainer.rows import RowTensors
from trivet.trainer.step import count_units, plan_step, share_of_step
from trivet.transport.explained import SampleShares
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
    packed = [(index, row) for index, item in enumerate(items) for row in pack([item], seq_len=seq_len)]
    rows = [row for _, row in packed]
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
        counts = count_units(rows)
        with scoring(model):
            for row in planned:
                shares = share_row(model, loss, row, counts=counts)
                for (row_index, _), sample in zip(row.sample_indices, shares, strict=True):
                    found[packed[row_index][0]] = sample
    return found


def share_row(model: PolicyModel, loss: Loss, row: RowTensors, *, counts: dict[LossUnit, int]) -> list[SampleShares]:
    """Return the shares of the samples of one row. The model is in `scoring`.

    Args:
        counts: the divisors of the step (`count_units`).
    """
    scores = model(row)
    with torch.enable_grad():
        # The loss sees the scores as leaves, so autograd gives its derivative for each token without the model's.
        leaves = TokenScores(scores.logprobs_N.detach().requires_grad_(), scores.entropies_N.detach().requires_grad_())
        row_loss = loss(leaves, row)
        (weights_N,) = torch.autograd.grad(share_of_step(row_loss, counts), [leaves.logprobs_N])
    losses_N = torch.stack([part.double() / counts[unit] for unit, part in row_loss.tokens.items()]).sum(dim=0)
    columns = {
        "logprobs_L": leaves.logprobs_N.detach().float(),
        "ratios_L": _tokens(row_loss.values["importance_ratio"]).float(),
        "losses_L": losses_N,
        "weights_L": weights_N.double(),
        "is_masked_L": _tokens(row_loss.values["is_masked"]),
        "is_low_L": _tokens(row_loss.values["is_masked_low"]),
        "is_high_L": _tokens(row_loss.values["is_masked_high"]),
    }
    ends = np.cumsum(row.num_loss_tokens_S)[:-1]
    parts = {name: np.split(column_N.cpu().numpy(), ends) for name, column_N in columns.items()}
    return [SampleShares(**{name: parts[name][number] for name in parts}) for number in range(row.num_samples)]


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
