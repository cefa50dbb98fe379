"""Compare attention by groups with torch's attention of each sample alone."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trivet.trainer.attention.grouped import Groups, grouped_attention

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
    assert [(group.num_samples, group.length) for group in groups.parts] == [(2, 512), (2, 64)]
