"""Makes up sequences, for measuring the trainer without data: `sft` with `data.type = "fake"`, and `--bench`.

Legend: T tokens of one sequence. The result depends on the arguments alone: it is the same on every rank and in every process.
"""

from typing import Literal

import numpy as np

from trivet.algorithms.packing import PackItem, pack
from trivet.algorithms.seeds import derive_seed
from trivet.wire.batches import MicroBatch
from trivet.wire.rollouts import Sample

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
    num_ranks: int = 1,
    rows_per_rank: int = 2,
    length: Lengths = "fixed",
    token_ids: TokenIds = "random",
) -> list[MicroBatch]:
    """Make a batch of rows of exactly `seq_len` tokens each, all trained on except the first of each sequence.

    A policy loss can be computed on them too: they have advantages, and the log-probabilities of a policy that draws evenly.

    Args:
        step: batches of different steps hold different sequences.
        seq_len: at least 2.
        length: `fixed`: one sequence a row; `variable`: the row is cut into sequences at random.
        token_ids: `random`: drawn evenly from the vocabulary; `increasing`: 0, 1, 2, … in each sequence.
    """
    rows: list[MicroBatch] = []
    for index in range(num_ranks * rows_per_rank):
        rng = np.random.default_rng(derive_seed(seed, "fake_row", step, index))
        lengths = [seq_len] if length == "fixed" else _cut(seq_len, rng)
        items = [_item(size, vocab_size=vocab_size, token_ids=token_ids, rng=rng) for size in lengths]
        rows += pack(items, seq_len=seq_len)
    return rows


def fake_groups(
    step: int,
    *,
    seed: int,
    seq_len: int,
    vocab_size: int,
    num_rows: int,
    prompt_len: int,
    answer_len: int | None,
    group_size: int,
) -> list[MicroBatch]:
    """Make a batch of samples that share prompts, as the rollouts of a group do. Answers alone are trained on.

    Args:
        step: batches of different steps hold different samples.
        num_rows: rows, each with as many samples as fit into `seq_len` tokens.
        answer_len: None lets a sample fill a row.
        group_size: samples that begin with the same prompt.
    """
    size = seq_len if answer_len is None else prompt_len + answer_len
    items: list[PackItem] = []
    for index in range(num_rows * (seq_len // size)):
        rng = np.random.default_rng(derive_seed(seed, "fake_row", step, index))
        item = _item(size, vocab_size=vocab_size, token_ids="random", rng=rng)
        prompt_rng = np.random.default_rng(derive_seed(seed, "fake_prompt", step, index // group_size))
        item.sample.token_ids_T[:prompt_len] = prompt_rng.integers(0, vocab_size, prompt_len)
        item.sample.loss_mask_T[:prompt_len] = False
        item.sample.logprobs_T[:prompt_len] = 0.0
        items.append(item)
    return pack(items, seq_len=seq_len)


def fake_item(
    index: int, *, seed: int, seq_len: int, vocab_size: int, length: Lengths = "fixed", token_ids: TokenIds = "random"
) -> PackItem:
    """Make sequence `index` of an endless fake data set: `seq_len` tokens, or with `variable` 2 to `seq_len`, drawn evenly."""
    rng = np.random.default_rng(derive_seed(seed, "fake_item", index))
    size = seq_len if length == "fixed" else int(rng.integers(MIN_LENGTH, seq_len, endpoint=True))
    return _item(size, vocab_size=vocab_size, token_ids=token_ids, rng=rng)


def _cut(seq_len: int, rng: np.random.Generator) -> list[int]:
    """Draw lengths that sum to `seq_len`, each evenly from what still fits; no rest is too short to be a sequence."""
    lengths: list[int] = []
    left = seq_len
    while left:
        size = int(rng.integers(MIN_LENGTH, left, endpoint=True))
        if left - size < MIN_LENGTH:
            size = left
        lengths.append(size)
        left -= size
    return lengths


def _item(size: int, *, vocab_size: int, token_ids: TokenIds, rng: np.random.Generator) -> PackItem:
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
