"""How a row is divided over the ranks of a context group. tests/integration/test_context_parallel.py has ranks that compute."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trivet.trainer.attention.context import ContextGroup
from trivet.trainer.measurement.fake import fake_rows
from trivet.trainer.rows import to_tensors


@pytest.mark.parametrize("seq_len", [3, 64, 65])
@pytest.mark.parametrize("size", [2, 4])
def test_slices_are_of_one_length_and_each_loss_token_is_scored_once(seq_len: int, size: int) -> None:
    (row,) = fake_rows(0, seed=0, seq_len=seq_len, vocab_size=50, num_rows=1)
    whole = to_tensors(row, device=torch.device("cpu"))
    nowhere: Any = SimpleNamespace()
    parts = [ContextGroup(group=nowhere, size=size, index=index).take_slice(whole) for index in range(size)]
    (length,) = {part.num_tokens for part, _ in parts}
    assert length * size - whole.num_tokens in range(size)
    token_ids = torch.cat([part.token_ids_1U for part, _ in parts], dim=1)
    assert torch.equal(token_ids[:, : whole.num_tokens], whole.token_ids_1U)
    assert all(sum(part.segments.lengths) == length * size for part, _ in parts)
    assert sorted(torch.cat([own for _, own in parts]).tolist()) == list(range(len(whole.targets_N)))
    for index, (part, own) in enumerate(parts):
        assert torch.equal(part.predictors_N + index * length, whole.predictors_N[own])
        assert torch.equal(part.targets_N, whole.targets_N[own])
