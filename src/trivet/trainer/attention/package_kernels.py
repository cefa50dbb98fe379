"""Puts a package's kernels behind torch's flash attention, once they agree with torch's own. Called by `trainer.attention.packed`.

Torch's operator stays, so what can be done with it, such as compiling and keeping its outputs, can be done with the package's
kernels. What is for a GPU here has not run on one yet.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

IMPLEMENTATIONS = {"flash_attention_3": "FA3", "flash_attention_4": "FA4"}
"""The name by which torch knows the kernels of each attention."""
PROBE_LENGTHS, PROBE_PATHS = (70, 1, 130), ((), (), (0,))
"""Segments of the row on which kernels are compared: of one token, of more than one block of a kernel, and behind a prefix."""
_QUERY_HEADS, _KEY_HEADS = 8, 2
_TOLERANCE = 0.02
"""Largest difference, as a share of what torch computes. Numbers of bfloat16 are 0.4 % apart; a wrong mask is tens of percent."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention over the row of `PROBE_LENGTHS`: of queries [1, H, T, D], keys and values [1, K, T, D]; returns [1, T, H, D]."""


def replace_kernels(attn: str, attend: Attend, *, head_dim: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Have torch's flash attention run the kernels of `attn` from now on, unless they compute something else.

    Args:
        attn: a key of `IMPLEMENTATIONS`.
        attend: runs torch's flash attention.

    Returns:
        None; or why torch's own kernels stay, as a clause for the user.
    """
    restore_flash_attention_impl(_raise_warn=False)  # an earlier model may have left a package's kernels there
    expected = _measure(attend, head_dim=head_dim, device=device, dtype=dtype)
    try:
        activate_flash_attention_impl(IMPLEMENTATIONS[attn])
        difference = _describe_difference(_measure(attend, head_dim=head_dim, device=device, dtype=dtype), expected)
    except Exception as exc:  # noqa: BLE001  packages compile kernels when they first run, and raise errors of many types
        first_line = str(exc).strip().partition("\n")[0]
        difference = f"its kernels failed on a small row ({type(exc).__name__}: {first_line})"
    if difference is not None:
        restore_flash_attention_impl(_raise_warn=False)
    return difference


def _measure(attend: Attend, *, head_dim: int, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the output of attention over the same random numbers each time, and the gradients of its inputs."""
    generator = torch.Generator().manual_seed(0)

    def draw(num_heads: int) -> torch.Tensor:
        numbers = torch.randn(1, num_heads, sum(PROBE_LENGTHS), head_dim, generator=generator)
        return numbers.to(device, dtype).requires_grad_()

    inputs = [draw(_QUERY_HEADS), draw(_KEY_HEADS), draw(_KEY_HEADS)]
    output = attend(*inputs)
    upstream = torch.randn(output.shape, generator=generator).to(device, dtype)
    gradients = torch.autograd.grad(output, inputs, upstream)
    names = ("the output", "the gradient of queries", "the gradient of keys", "the gradient of values")
    return dict(zip(names, (output.detach(), *gradients), strict=True))


def _describe_difference(found: dict[str, Any], expected: dict[str, Any]) -> str | None:
    for name, values in expected.items():
        exact = values.double()
        error = float((found[name].double() - exact).norm() / exact.norm())
        if not error <= _TOLERANCE:  # also where it is no number
            return f"{name} differs by {error:.1%} from that of torch's own kernels"
    return None
