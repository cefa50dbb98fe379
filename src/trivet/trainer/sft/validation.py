"""Measures the loss on held-out conversations for `trainer.sft.main`, without changing the model or training's random state."""

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from trivet.algorithms.packing import pack
from trivet.checkpoints.data_record import DataRecord
from trivet.config.schema.sft import SftConfig
from trivet.errors import ConfigError, Diverged
from trivet.trainer.model.policy_model import PolicyModel, free_gathered, without_dropout
from trivet.trainer.ranks.world import World, sum_over_ranks
from trivet.trainer.rows import plan_rows
from trivet.trainer.sft.batches import held_out_items
from trivet.wire.batches import MicroBatch
from trivet.wire.codec import encode
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)

ROWS_PER_RANK = 16
"""Rows on the device at one time: all held-out rows may not fit into its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The held-out rows and when they are measured."""

    rows: Sequence[MicroBatch]
    interval: int
    does_start: bool

    def record(self) -> DataRecord:
        """Return what is measured, to find on a resume that it is something else."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(encode(row))
        return DataRecord(num_records=len(self.rows), digest=digest.hexdigest())

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Tell whether to measure after `step`; 0 means the start model."""
        return self.does_start if step == 0 else is_last or step % self.interval == 0

    def measure(self, model: PolicyModel, world: World, *, step: Step) -> dict[str, float]:
        """Return the mean loss over all loss tokens (`val/loss`, nats) and its exponential as metrics. Collective.

        Raises:
            Diverged: the loss is NaN or infinite.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=world.device)
        size = ROWS_PER_RANK * world.size
        with torch.no_grad(), without_dropout(model):
            for start in range(0, len(self.rows), size):
                part = self.rows[start : start + size]
                plan = plan_rows(part, num_ranks=world.size, shares_prefixes=model.shares_prefixes, packs=model.packs)
                for row in plan.take(world.rank, device=world.device):
                    logprobs_N = model(row).logprobs_N
                    if not row.is_dummy:
                        totals[0] -= logprobs_N.double().sum()
                        totals[1] += len(logprobs_N)
        free_gathered(model)
        total, count = sum_over_ranks(world, totals).tolist()
        loss = total / count
        if not math.isfinite(loss):
            raise Diverged(f"the held-out loss after step {step} is {loss}; lower optim.lr, or look at val.data")
        logger.info("held-out loss step=%s loss=%.4f tokens=%d", step, loss, count)
        return {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700.0)), "val/num_tokens": count}


def open_validation(config: SftConfig, tokenizer: PreTrainedTokenizerBase) -> Validation | None:
    """Read the held-out data that `config.val` names; return None when nothing is held out.

    Raises:
        ConfigError: val.data cannot be read, or nothing in it is measured.
    """
    if config.val is None:
        return None
    seq_len = config.model.seq_len
    items = held_out_items(config.val.data, tokenizer, seed=config.seed)
    rows = pack(items, seq_len=seq_len)
    if not rows:
        raise ConfigError(
            f"val.data.name = {config.val.data.name!r} has no token to measure within model.seq_len ({seq_len}): look at "
            "val.data.loss_mask and at the roles in the data"
        )
    num_cut = sum(item.sample.num_tokens > seq_len for item in items)
    logger.info("held-out data loaded conversations=%s truncated=%s", len(items), num_cut)
    return Validation(rows=rows, interval=config.val.interval, does_start=config.val.eval_on_start)
