"""Makes up sequences for the trainer without data: `trainer.data.fake`, `sft` with `data.type = "fake"`, and `--bench`.

Legend: T tokens of one sequence. The result depends on the arguments alone: it is the same on every rank and in every process.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from trivet.algorithms.arithmetic import derive_seed
from trivet.algorithms.packing import PackItem, pack
from trivet.config.schema.trainer import FakeBatchesConfig
from trivet.wire.batches import Batch, BatchPurpose, MicroBatch
from trivet.wire.rollouts import Sample
from trivet.wire.versions import Step

Lengths = Literal["fixed", "variable"]
TokenIds = Literal["increasing", "random"]

MIN_LENGTH = 2
"""Least tokens of a sequence: one to predict, and one to predict it from."""


def fake_rows(
    step: int,
    *,
    seed: int,
    seq_len: int,
    vocab_size: int,
    num_rows: int = 2,
    prompt_len: int = 0,
    answer_len: int | None = None,
    group_size: int = 1,
) -> list[MicroBatch]:
    """Make a batch of samples that share prompts, as the rollouts of a group do. Only answers are trained on.

    Samples have random advantages, and the log-probabilities of a policy that samples uniformly, so policy losses can use them.

    Args:
        step: batches of different steps hold different samples.
        seq_len: at least 2.
        num_rows: rows, each with as many samples as fit into `seq_len` tokens.
        prompt_len: tokens of a prompt.
        answer_len: tokens of an answer; None: a sample fills a row.
        group_size: samples that begin with the same prompt.
    """
    size = seq_len if answer_len is None else prompt_len + answer_len
    items: list[PackItem] = []
    for index in range(num_rows * (seq_len // size)):
        item = _item(size, vocab_size=vocab_size, rng=np.random.default_rng(derive_seed(seed, "fake_row", step, index)))
        prompt_rng = np.random.default_rng(derive_seed(seed, "fake_prompt", step, index // group_size))
        item.sample.token_ids_T[:prompt_len] = prompt_rng.integers(0, vocab_size, prompt_len)
        item.sample.loss_mask_T[:prompt_len] = False
        item.sample.logprobs_T[:prompt_len] = 0.0
        items.append(item)
    return pack(items, seq_len=seq_len)


def fake_rows_of_many_lengths(step: int, *, seed: int, seq_len: int, vocab_size: int, num_rows: int) -> list[MicroBatch]:
    """Make a batch of rows of exactly `seq_len` tokens, each cut into sequences at random."""
    rows: list[MicroBatch] = []
    for index in range(num_rows):
        rng = np.random.default_rng(derive_seed(seed, "fake_row", step, index))
        lengths: list[int] = []
        while left := seq_len - sum(lengths):
            size = int(rng.integers(MIN_LENGTH, left, endpoint=True))
            lengths.append(left if left - size < MIN_LENGTH else size)  # a rest too short for a sequence joins this one
        rows += pack([_item(size, vocab_size=vocab_size, rng=rng) for size in lengths], seq_len=seq_len)
    return rows


def fake_item(
    index: int, *, seed: int, seq_len: int, vocab_size: int, length: Lengths = "fixed", token_ids: TokenIds = "random"
) -> PackItem:
    """Make sequence `index` of an endless fake data set. A `variable` length is 2 to `seq_len`, `increasing` tokens are 0, 1, 2."""
    rng = np.random.default_rng(derive_seed(seed, "fake_item", index))
    size = seq_len if length == "fixed" else int(rng.integers(MIN_LENGTH, seq_len, endpoint=True))
    return _item(size, vocab_size=vocab_size, token_ids=token_ids, rng=rng)


def _item(size: int, *, vocab_size: int, rng: np.random.Generator, token_ids: TokenIds = "random") -> PackItem:
    ids_T = np.arange(size) % vocab_size if token_ids == "increasing" else rng.integers(0, vocab_size, size)
    mask_T = np.ones(size, dtype=np.bool_)
    mask_T[0] = False
    sample = Sample(
        token_ids_T=ids_T.astype(np.int32),
        loss_mask_T=mask_T,
        logprobs_T=np.where(mask_T, -np.log(vocab_size), 0.0).astype(np.float32),
        versions=[],
        temperature=1.0,
    )
    return PackItem(sample=sample, advantage=float(rng.standard_normal()))


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeReceiver:
    """A `BatchReceiver` of made-up batches, for a run of the trainer by itself."""

    config: FakeBatchesConfig
    seed: int
    seq_len: int
    vocab_size: int
    from_step: Step

    def receive(self, step: Step) -> Batch:
        """Return batch `step`, the same each time; for the step that the run starts from, an empty probe."""
        if step == self.from_step:
            return Batch(step=step, purpose=BatchPurpose.PROBE, micro_batches=[], group_ids=[], num_rollouts=0)
        make = fake_rows_of_many_lengths if self.config.generate_samples else fake_rows
        rows = make(step, seed=self.seed, seq_len=self.seq_len, vocab_size=self.vocab_size, num_rows=self.config.batch_size)
        num_rollouts = sum(len(row.sequence_lengths_S) for row in rows)
        return Batch(step=step, purpose=BatchPurpose.TRAIN, micro_batches=rows, group_ids=[], num_rollouts=num_rollouts)

    def close(self) -> None:
        """Do nothing: the receiver holds no resource."""
