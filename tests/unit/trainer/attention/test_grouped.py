"""Compare attention by groups with torch's attention of each sample alone."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trivet.trainer.attention.grouped import Groups, grouped_attention
from trivet.trainer.attention.packed import Segments, sdpa_packed

K, G, D, SCALE = 2, 3, 8, 0.3


def make_tensors(num_tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_tokens, K * G, D), (num_tokens, K, D), (num_tokens, K, D))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    parts = zip(*(tensor.transpose(0, 1)[None].split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True) for q, k, v in parts]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


# The shapes have padding within a group, several groups, blocks of a long sample with and without one more token, a single
# token.
@pytest.mark.parametrize("lengths", [[5, 33, 7, 31], [200, 4, 90, 80], [300, 256, 257], [1], [640, 1, 3]])
def test_outputs_and_gradients_equal_those_of_each_sample_alone(lengths: list[int]) -> None:
    tensors = make_tensors(sum(lengths))
    found, expected = grouped_attention(*tensors, Groups.of(lengths), scale=SCALE), alone(*tensors, lengths)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = zip(*(torch.autograd.grad(output, tensors, upstream) for output in (found, expected)), strict=True)
    for of_groups, of_samples in pairs:
        torch.testing.assert_close(of_groups, of_samples, rtol=1e-11, atol=1e-12)


def test_bf16_is_as_near_to_the_exact_result_as_its_rounding_allows() -> None:
    lengths = [40, 300, 37]
    narrow = make_tensors(sum(lengths), torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in narrow]
    outputs = grouped_attention(*narrow, Groups.of(lengths), scale=SCALE), alone(*exact, lengths)
    upstream = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, expected = (
        [output, *torch.autograd.grad(output, tensors, upstream.to(output.dtype))]
        for output, tensors in zip(outputs, (narrow, exact), strict=True)
    )
    for ours, theirs in zip(found, expected, strict=True):
        # A bf16 number is rounded by at most 2^-9, and so are scores, probabilities and results.
        assert (ours.double() - theirs).norm() / theirs.norm() < 4 * 2**-9


def test_samples_of_very_different_length_are_not_padded_to_one() -> None:
    groups = Groups.of([500, 60, 490, 50])
    assert [(group.num_segments, group.length) for group in groups.parts] == [(2, 512), (2, 64)]


# A prompt and its answers, answers of very different length, two prompts of like length, a branch of a branch, long prefixes.
TREES = {
    "group": ([40, 5, 33, 7], [[], [0], [0], [0]]),
    "uneven": ([20, 3, 300, 90], [[], [0], [0], [0]]),
    "two prompts": ([40, 5, 33, 37, 9, 12, 8], [[], [0], [0], [], [3], [3], []]),
    "branches": ([20, 4, 6, 30, 2, 5], [[], [0], [0], [0, 2], [0, 2], [0, 2, 3]]),
    "long prefix": ([600, 270, 30], [[], [0], [0]]),
}


def describe(lengths: list[int], paths: list[list[int]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tokens of each segment, and those of its prefix."""
    own = list(torch.arange(sum(lengths)).split(lengths))
    return own, [torch.cat([own[0][:0], *(own[each] for each in path)]) for path in paths]


@pytest.mark.parametrize("attention", ["grouped", "sdpa"])
@pytest.mark.parametrize("tree", TREES)
def test_a_segment_sees_its_prefix_as_if_each_sample_were_alone(tree: str, attention: str) -> None:
    lengths, paths = TREES[tree]
    own, prefixes = describe(lengths, paths)
    tensors = make_tensors(sum(lengths))
    whole = [torch.cat(pair) for pair in zip(prefixes, own, strict=True)]
    samples = torch.cat(whole)
    repeated = alone(*(tensor[samples] for tensor in tensors), [len(each) for each in whole])
    parts = repeated.split([len(each) for each in whole])
    expected = torch.cat([part[len(prefix) :] for part, prefix in zip(parts, prefixes, strict=True)])
    if attention == "grouped":
        found = grouped_attention(*tensors, Groups.of(lengths, prefixes), scale=SCALE)
    else:
        segments = Segments.behind(lengths, paths, device=torch.device("cpu"))
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in tensors)
        found = sdpa_packed(torch.nn.Identity(), query, key, value, None, segments=segments, scaling=SCALE)[0][0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = zip(*(torch.autograd.grad(output, tensors, upstream) for output in (found, expected)), strict=True)
    for of_tree, of_samples in pairs:
        torch.testing.assert_close(of_tree, of_samples, rtol=1e-11, atol=1e-12)


def test_answers_to_prompts_of_like_length_are_computed_at_once() -> None:
    lengths, paths = TREES["two prompts"]
    groups = Groups.of(lengths, describe(lengths, paths)[1])
    assert [(group.num_segments, group.prefix_length) for group in groups.parts] == [(4, 40), (3, 0)]


def test_gradients_of_a_prefix_are_summed_in_float32() -> None:
    """Sixty-four answers to one prompt: in bf16 the later ones would be lost."""
    lengths, paths = [8] + [4] * 64, [[], *[[0]] * 64]
    _, prefixes = describe(lengths, paths)
    narrow = make_tensors(sum(lengths), torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in narrow]
    groups = Groups.of(lengths, prefixes)
    upstream = torch.ones(sum(lengths), K * G, D, dtype=torch.bfloat16)
    outputs = [grouped_attention(*tensors, groups, scale=SCALE) for tensors in (narrow, exact)]
    (of_value,), (expected,) = (
        torch.autograd.grad(output, tensors[2], upstream.to(output.dtype))
        for output, tensors in zip(outputs, (narrow, exact), strict=True)
    )
    assert ((of_value[:8].double() - expected[:8]).norm() / expected[:8].norm()) < 2 * 2**-9
