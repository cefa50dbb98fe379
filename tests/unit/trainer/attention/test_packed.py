import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config

from trivet.errors import ConfigError
from trivet.trainer.attention.packed import (
    Segments,
    choose_attention,
    package_packed,
    register_attention,
    require_full_attention,
    sdpa_packed,
)
from trivet.trainer.rows import to_tensors

CPU = torch.device("cpu")


def test_each_segment_is_attended_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    found, _ = sdpa_packed(
        torch.nn.Identity(), query, key, value, None, segments=Segments.of([4, 1, 4], device=CPU), scaling=0.3
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


def test_auto_groups_samples_on_the_cpu() -> None:
    assert register_attention("auto", device=CPU, dtype=torch.float32).endswith("by_group")


@pytest.mark.parametrize(
    ("capability", "packages", "dtype", "has_softcap", "expected"),
    [
        ((9, 0), {"flash_attn", "flash_attn_interface"}, "bfloat16", False, "flash_attention_3"),
        ((9, 0), {"flash_attn"}, "bfloat16", False, "flash_varlen"),
        ((8, 0), {"flash_attn", "flash_attn_interface"}, "bfloat16", False, "flash_varlen"),
        ((9, 0), {"flash_attn_interface"}, "bfloat16", True, "sdpa"),
        ((9, 0), {"flash_attn_interface"}, "float32", False, "sdpa"),
        ((7, 5), set[str](), "float32", False, "sdpa"),
        ((7, 5), set[str](), "bfloat16", False, "sdpa"),
    ],
)
def test_auto_takes_the_fastest_that_runs_on_cuda(
    capability: tuple[int, int], packages: set[str], dtype: str, has_softcap: bool, expected: str
) -> None:
    found = choose_attention(
        "auto",
        device_type="cuda",
        capability=capability,
        is_float32=dtype == "float32",
        has_softcap=has_softcap,
        is_installed=packages.__contains__,
    )
    assert found == expected


@pytest.mark.parametrize("attn", ["flash_varlen", "flash_attention_2", "flash_attention_3"])
def test_flash_attention_is_refused_without_cuda(attn: str) -> None:
    with pytest.raises(ConfigError, match=r'set model\.attn = "sdpa"'):
        register_attention(attn, device=CPU, dtype=torch.bfloat16)


def test_an_attention_whose_package_is_missing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs the Python module flash_attn, which is not installed"):
        choose_attention(
            "flash_attention_2", device_type="cuda", capability=(8, 0), has_softcap=False, is_installed=set[str]().__contains__
        )


def test_attention_by_groups_is_refused_on_cuda() -> None:
    with pytest.raises(ConfigError, match=r'"grouped" is for the CPU'):
        choose_attention(
            "grouped", device_type="cuda", capability=(9, 0), has_softcap=False, is_installed=set[str]().__contains__
        )


def test_flash_attention_2_gets_the_samples_of_a_row_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package's function computes each sample alone."""

    def stand_in(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
        assert causal
        assert max_seqlen_q == max_seqlen_k == 4
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        lengths = cu_seqlens_q.diff().tolist()
        parts = zip(*(tensor.transpose(0, 1)[None].split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
        outputs = [
            scaled_dot_product_attention(*part, is_causal=True, scale=softmax_scale, enable_gqa=True)[0] for part in parts
        ]
        return torch.cat(outputs, dim=1).transpose(0, 1)

    package = types.ModuleType("flash_attn")
    monkeypatch.setattr(package, "flash_attn_varlen_func", stand_in, raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, 9, 8, generator=generator) for heads in (4, 2, 2)]
    segments = Segments.of([4, 1, 4], device=CPU)
    found, expected = (
        function(torch.nn.Identity(), *tensors, None, segments=segments, scaling=0.3)[0]
        for function in (partial(package_packed, "flash_attention_2"), sdpa_packed)
    )
    torch.testing.assert_close(found, expected)


def test_a_window_shorter_than_a_row_is_refused() -> None:
    windowed = Qwen3Config(use_sliding_window=True, sliding_window=512, max_window_layers=0, num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"model\.seq_len <= 512"):
        require_full_attention(windowed, seq_len=2048)
    require_full_attention(windowed, seq_len=512)
    require_full_attention(Qwen3Config(sliding_window=512, num_hidden_layers=2), seq_len=2048)
