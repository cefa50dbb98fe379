"""Every attention, on every device that has it, is compared with attention in float64 that has all scores in memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from torch.nn.attention import restore_flash_attention_impl
from transformers import AttentionInterface

from trivet.trainer.attention.choice import PACKAGES, HeadDims, choose_attention
from trivet.trainer.attention.packed import Segments, register_attention

pytestmark = pytest.mark.device

FLASH = ("flash_varlen", *PACKAGES)
CASES = [
    *(pytest.param("cpu", "sdpa", dtype) for dtype in (torch.float32, torch.bfloat16)),
    *(pytest.param("cuda", "sdpa", dtype, marks=pytest.mark.gpu) for dtype in (torch.float32, torch.bfloat16)),
    *(pytest.param("cuda", attn, torch.bfloat16, marks=pytest.mark.gpu) for attn in FLASH),
]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Share of the largest value, or of 1 where all are smaller.

A bfloat16 is rounded by 2**-9: five such roundings, of scores, weights and outputs, are 1e-2. Float32 kernels for CUDA may add
three products of 10 bits each, which leaves 1e-5.
"""


@dataclass(frozen=True)
class Shape:
    """A row, and the heads of a model."""

    lengths: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    """For each segment those that it continues."""
    query_heads: int
    key_heads: int
    dim: int


SHAPES = {
    "one token": Shape((1,), ((),), 4, 2, 64),
    "samples of odd lengths": Shape((129, 1, 300, 17), ((), (), (), ()), 16, 8, 128),
    "no groups, narrow heads": Shape((5, 64, 31), ((), (), ()), 3, 3, 40),
    "wide heads": Shape((70, 3), ((), ()), 4, 1, 256),
    "a shared prompt": Shape((64, 30, 200, 1), ((), (0,), (0,), (0,)), 8, 2, 64),
    "a tree of prompts": Shape((40, 20, 9, 12, 33), ((), (0,), (0, 1), (0, 1), ()), 4, 4, 64),
}


@pytest.fixture(autouse=True)
def _torchs_own_kernels() -> Iterator[None]:
    """Put torch's own kernels back: a package's kernels would stay behind torch's flash attention for every later test."""
    yield
    restore_flash_attention_impl(_raise_warn=False)


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: Shape, *, scale: float) -> torch.Tensor:
    """Return [1, T, H, D] of tensors [1, heads, T, D]."""
    own = list(torch.arange(sum(shape.lengths)).split(list(shape.lengths)))
    outputs = []
    for tokens, path in zip(own, shape.paths, strict=True):
        seen = torch.cat([*(own[each] for each in path), tokens])
        keys, values = (
            tensor[:, :, seen].repeat_interleave(shape.query_heads // shape.key_heads, dim=1) for tensor in (key, value)
        )
        scores = query[:, :, tokens] @ keys.transpose(2, 3) * scale
        is_later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + len(seen) - len(tokens))
        outputs.append(scores.masked_fill(is_later, -torch.inf).softmax(dim=-1) @ values)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def require_usable(attn: str, *, device: str, dtype: torch.dtype, dim: int) -> None:
    """Skip an attention for which this machine lacks the GPU or the package."""
    if attn in PACKAGES and find_spec(PACKAGES[attn]) is None:
        pytest.skip(f"the package {PACKAGES[attn]} is not installed")
    if attn in FLASH and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention needs compute capability 8.0")
    assert choose_attention(
        attn,
        device_type=device,
        capability=torch.cuda.get_device_capability() if device == "cuda" else None,
        is_float32=dtype == torch.float32,
        has_special_scores=False,
        heads=HeadDims(query=dim, value=dim),
        is_installed=lambda package: find_spec(package) is not None,
    )


def results(
    compute: Callable[..., torch.Tensor], tensors: list[torch.Tensor], upstream: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Yield the output and the gradients of queries, keys and values, in float64 on the CPU."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = compute(*leaves)
    for tensor in (output, *torch.autograd.grad(output, leaves, upstream)):
        yield tensor.detach().cpu().double()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("device", "attn", "dtype"), CASES)
def test_outputs_and_gradients_are_those_of_float64(device: str, attn: str, dtype: torch.dtype, shape: Shape) -> None:
    require_usable(attn, device=device, dtype=dtype, dim=shape.dim)
    generator = torch.Generator().manual_seed(0)
    total = sum(shape.lengths)
    heads = (shape.query_heads, shape.key_heads, shape.key_heads)
    tensors = [torch.randn(1, count, total, shape.dim, generator=generator).to(dtype) for count in heads]
    upstream = torch.randn(1, total, shape.query_heads, shape.dim, generator=generator).to(dtype)
    name = register_attention(attn, device=torch.device(device), dtype=dtype, heads=HeadDims(query=shape.dim, value=shape.dim))
    segments = Segments.from_paths(shape.lengths, shape.paths, device=torch.device(device))

    def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        function = AttentionInterface()[name]
        return function(torch.nn.Identity(), query, key, value, None, segments=segments, scaling=shape.dim**-0.5)[0]

    found = results(ours, [tensor.to(device) for tensor in tensors], upstream.to(device))
    expected = results(
        lambda *doubles: exact(*doubles, shape, scale=shape.dim**-0.5),
        [tensor.double() for tensor in tensors],
        upstream.double(),
    )
    for kind, ours_of, theirs in zip(("output", "query", "key", "value"), found, expected, strict=True):
        error = float((ours_of - theirs).abs().max() / theirs.abs().max().clamp_min(1.0))
        assert error < TOLERANCE[dtype], f"{kind}: {error:.1e}"
