from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trivet.errors import ConfigError
from trivet.trainer.attention import packed
from trivet.trainer.attention.choice import HeadDims
from trivet.trainer.attention.packed import (
    Segments,
    flash_varlen_packed,
    register_attention,
    sdpa_packed,
)
from trivet.trainer.rows import to_tensors

CPU = torch.device("cpu")
HEADS = HeadDims(query=64, value=64)


def test_each_segment_is_attended_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    found, _ = sdpa_packed(
        torch.nn.Identity(), query, key, value, None, segments=Segments.from_samples([4, 1, 4], device=CPU), scaling=0.3
    )
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        alone = scaled_dot_product_attention(
            query[:, :, start:stop],
            key[:, :, start:stop].repeat_interleave(2, dim=1),
            value[:, :, start:stop].repeat_interleave(2, dim=1),
            is_causal=True,
            scale=0.3,
        )
        torch.testing.assert_close(found[:, start:stop], alone.transpose(1, 2))


def test_a_sample_scores_the_same_whatever_is_packed_around_it(tiny_model: Path, make_learner, oracle) -> None:
    model = make_learner(tiny_model).model
    first, *others = oracle.make_examples(count=4, vocab_size=100)
    rows = [[first], [*others, first], [first, *others[::-1]]]
    with torch.no_grad():
        alone, last, leading = (model(to_tensors(oracle.make_row(row), device=CPU)).logprobs_N for row in rows)
    count = len(alone)
    torch.testing.assert_close(last[-count:], alone)
    torch.testing.assert_close(leading[:count], alone)


def test_a_token_changes_nothing_outside_its_sample(tiny_model: Path, make_learner, oracle) -> None:
    model = make_learner(tiny_model).model
    examples = oracle.make_examples(count=3, vocab_size=100)
    row, changed = oracle.make_row(examples), oracle.make_row(examples)
    middle = slice(len(examples[0].token_ids), len(examples[0].token_ids) + len(examples[1].token_ids))
    changed.token_ids_T[middle] = (changed.token_ids_T[middle] + 1) % 100
    counts = [sum(example.is_trained) for example in examples]
    with torch.no_grad():
        before, after = (model(to_tensors(r, device=CPU)).logprobs_N.split(counts) for r in (row, changed))
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("num_keys_before", [0, 10], ids=["samples alone", "a shared prefix"])
@pytest.mark.parametrize("window", [None, 3], ids=["all keys", "a window"])
def test_segments_of_like_lengths_are_computed_at_once_as_each_alone(
    num_keys_before: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, path = [5, 9, 7, 40], [0] if num_keys_before else []
    segments = Segments.from_paths([10, *lengths], [[], *[path] * 4], device=CPU)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, 71, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    query, key, value = tensors
    calls: list[int] = []

    def count(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(len(query))
        return scaled_dot_product_attention(query, *args, **kwargs)

    monkeypatch.setattr(packed, "scaled_dot_product_attention", count)
    found = sdpa_packed(torch.nn.Identity(), query, key, value, None, segments=segments, sliding_window=window)[0]
    assert sorted(calls) == ([1, 1, 3] if num_keys_before else [1, 4])
    start, outputs = 0, []
    for length, prefix in zip([10, *lengths], [0, *[num_keys_before] * 4], strict=True):
        keys = [*range(prefix), *range(start, start + length)]
        place = torch.arange(length)[:, None] + prefix - torch.arange(length + prefix)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start : start + length],
                key[:, :, keys],
                value[:, :, keys],
                attn_mask=(place >= 0) & (place < (window or 100)),
                enable_gqa=True,
            )
        )
        start += length
    expected = torch.cat(outputs, dim=2).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(expected.shape, generator=generator)
    for own, other in zip(
        *(torch.autograd.grad((output * weights).sum(), tensors) for output in (found, expected)), strict=True
    ):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("paths", [[[], []], [[], [0]]], ids=["samples alone", "a shared prefix"])
def test_keys_have_as_many_heads_as_queries_for_the_kernels_of_a_gpu(
    paths: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meta tensors stand in for those of a GPU."""
    meta, heads = torch.device("meta"), list[tuple[int, int, bool]]()

    def record(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, enable_gqa: bool, **_: Any) -> torch.Tensor:
        heads.append((key.shape[1], value.shape[1], enable_gqa))
        return query

    monkeypatch.setattr(packed, "scaled_dot_product_attention", record)
    tensors = [torch.empty(1, count, 7, 8, device=meta) for count in (4, 2, 2)]
    sdpa_packed(torch.nn.Identity(), *tensors, None, segments=Segments.from_paths([4, 3], paths, device=meta))
    assert heads == [(4, 4, False)] * (2 if paths[1] else 1)


@pytest.mark.parametrize("attn", ["flash_varlen", "flash_attention_2", "flash_attention_3"])
def test_flash_attention_is_refused_without_cuda(attn: str) -> None:
    with pytest.raises(ConfigError, match=r'set model\.attn = "sdpa"'):
        register_attention(attn, device=CPU, dtype=torch.bfloat16, heads=HEADS)


@pytest.mark.parametrize("paths", [[[], [], []], [[], [0], [0]]], ids=["samples alone", "a shared prefix"])
def test_a_token_sees_no_further_than_its_window(paths: list[list[int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 19, 8, generator=generator) for heads in (4, 2, 2))
    segments = Segments.from_paths([7, 9, 3], paths, device=CPU)
    found = sdpa_packed(torch.nn.Identity(), query, key, value, None, segments=segments, sliding_window=5)[0]
    own = list(torch.arange(19).split([7, 9, 3]))
    for tokens, path in zip(own, paths, strict=True):
        seen = torch.cat([*(own[segment] for segment in path), tokens])
        for number, token in enumerate(tokens.tolist()):
            end = len(seen) - len(tokens) + number + 1
            window = seen[max(0, end - 5) : end]
            alone = scaled_dot_product_attention(
                query[:, :, [token]],
                key[:, :, window].repeat_interleave(2, dim=1),
                value[:, :, window].repeat_interleave(2, dim=1),
            )
            torch.testing.assert_close(found[:, token], alone[:, :, 0])


def test_a_sink_takes_its_share_of_the_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 6, 8, generator=generator) for _ in range(3))
    sinks = torch.tensor([0.5, -1.0])
    segments = Segments.from_samples([4, 2], device=CPU)
    found = sdpa_packed(torch.nn.Identity(), query, key, value, None, segments=segments, scaling=0.3, s_aux=sinks)[0]
    scores = 0.3 * query[0, :, 5] @ key[0, :, 4:6].transpose(1, 2)
    weights = torch.cat([scores.diagonal().T, sinks[:, None]], dim=-1).softmax(dim=-1)[:, :2]
    torch.testing.assert_close(found[0, 5], torch.einsum("hk,hkd->hd", weights, value[0, :, 4:6]))


def test_flash_attention_gets_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = list[tuple[int, int]]()

    def record(query: torch.Tensor, *_: Any, window_size: tuple[int, int], **__: Any) -> torch.Tensor:
        windows.append(window_size)
        return query

    monkeypatch.setattr(packed, "varlen_attn", record)
    tensors = [torch.empty(1, count, 7, 8) for count in (4, 2, 2)]
    for window in (None, 5):
        flash_varlen_packed(
            torch.nn.Identity(), *tensors, None, segments=Segments.from_samples([4, 3], device=CPU), sliding_window=window
        )
    assert windows == [(-1, 0), (4, 0)]
