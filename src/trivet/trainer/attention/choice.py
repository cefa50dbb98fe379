"""Chooses the attention of packed rows by the device, its compute capability, the dtype, the model's heads and installed packages.

Called by `trainer.attention.packed`. Torch's flash attention can run the kernels of a package. It gets them if they agree with its
own kernels. The operator stays torch's, so compiling it and keeping its outputs work with these kernels too. The choices for a GPU
have not run on one yet.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from transformers import PreTrainedConfig

from trivet.errors import ConfigError

PACKAGES = {
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute.interface",
}
"""The Python module of each attention that torch does not have."""
_FIRST_WITH_FLASH = (8, 0)
"""Compute capability of the first GPUs that flash attention runs on."""
_CAPABILITIES = {"flash_attention_3": ((9, 0),), "flash_attention_4": ((9, 0), (10, 0))}
"""Compute capabilities of the GPUs that the kernels of a package are for: Hopper, and Blackwell of data centers."""
_MAX_FLASH_DIM = 256
"""Most features of a head that flash attention computes; the number must be a multiple of 8."""
_MAX_DIMS = {"flash_attention_4": 128}
"""The same for kernels with a lower limit."""
IMPLEMENTATIONS = {"flash_attention_3": "FA3", "flash_attention_4": "FA4"}
"""Torch's names of the kernels of each attention."""
PROBE_LENGTHS, PROBE_PATHS = (70, 1, 130), ((), (), (0,))
"""Lengths in tokens, and prefixes (indices of segments), of the three segments of a test row on which kernels are compared: one
segment has a single token, one is longer than a block of a kernel and continues the first."""
_QUERY_HEADS, _KEY_HEADS = 8, 2
_TOLERANCE = 0.02
"""Largest relative difference from torch's own kernels. Numbers of bfloat16 are 0.4 % apart. A wrong mask changes results by
tens of percent."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention over the row of `PROBE_LENGTHS`: of queries [1, H, T, D], keys and values [1, K, T, D]; returns [1, T, H, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDims:
    """The features of a model's heads."""

    query: int
    """Features of queries and keys."""
    value: int

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "HeadDims":
        """Read the features from a model's own configuration. Keys of multi-head latent attention have two parts."""
        text = config.get_text_config()
        if getattr(text, "qk_nope_head_dim", None) is not None:
            return cls(query=text.qk_nope_head_dim + text.qk_rope_head_dim, value=text.v_head_dim)
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(query=dim, value=dim)

    @property
    def fits_flash_attention(self) -> bool:
        """True for heads that flash attention can compute."""
        return self.query == self.value <= _MAX_FLASH_DIM and self.query % 8 == 0


def choose_attention(
    attn: str,
    *,
    device_type: str,
    capability: tuple[int, int] | None,
    is_float32: bool = False,
    has_special_scores: bool,
    heads: HeadDims,
    is_installed: Callable[[str], bool],
) -> str:
    """Resolve `model.attn` on this device: "auto" becomes the fastest attention, any other value is checked.

    Args:
        capability: compute capability of the CUDA device.
        is_float32: the model computes in float32, in which no flash attention computes.
        has_special_scores: the model caps scores or has sinks, which only `sdpa` supports.
        is_installed: returns whether a Python module is installed.
    """
    if attn == "auto":
        if has_special_scores or device_type != "cuda" or is_float32 or _why_no_flash("flash_varlen", capability, heads):
            return "sdpa"
        packages = (
            name for name in _CAPABILITIES if not _why_no_flash(name, capability, heads) and is_installed(PACKAGES[name])
        )
        return next(packages, "flash_varlen")
    if attn == "sdpa":
        return attn
    if has_special_scores:
        raise ConfigError(
            f'model.attn = "{attn}" can neither cap scores nor add sinks as this model does; set model.attn = "sdpa"'
        )
    if device_type != "cuda":
        raise ConfigError(f'model.attn = "{attn}" needs a CUDA device, this is {device_type}; set model.attn = "sdpa"')
    if reason := _why_no_flash(attn, capability, heads):
        raise ConfigError(f'model.attn = "{attn}" cannot be used: {reason}; set model.attn = "auto"')
    if attn in PACKAGES and not is_installed(PACKAGES[attn]):
        raise ConfigError(
            f'model.attn = "{attn}" needs the Python module {PACKAGES[attn]}, which is not installed; install it, or set '
            'model.attn = "flash_varlen", which torch brings'
        )
    return "flash_varlen" if attn == "flash_attention_2" else attn  # torch's own is made from flash attention 2


def _why_no_flash(attn: str, capability: tuple[int, int] | None, heads: HeadDims) -> str | None:
    """Return why flash attention `attn` cannot compute on a GPU, as a clause for the user; None where it can."""
    if capability is not None and capability < _FIRST_WITH_FLASH:
        return f"flash attention needs compute capability 8.0, this GPU has {_join(capability)}"
    possible = _CAPABILITIES.get(attn)
    if capability is not None and possible and capability not in possible:
        return f"it needs compute capability {' or '.join(map(_join, possible))}, this GPU has {_join(capability)}"
    if not heads.fits_flash_attention or heads.query > _MAX_DIMS.get(attn, _MAX_FLASH_DIM):
        return (
            f"it takes heads of a multiple of 8 features, at most {_MAX_DIMS.get(attn, _MAX_FLASH_DIM)} and as many for values as "
            f"for keys; this model's keys have {heads.query}, its values {heads.value}"
        )
    return None


def _join(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def replace_kernels(attn: str, attend: Attend, *, head_dim: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Let torch's flash attention use the kernels of the package `attn`, if they compute the same as torch's own kernels.

    Returns None if the kernels were replaced, else the reason why torch's own kernels stay, as a clause for the user.

    Args:
        attend: runs torch's flash attention on the test row.
    """
    restore_flash_attention_impl(_raise_warn=False)  # an earlier model may have left a package's kernels there
    expected = _measure(attend, head_dim=head_dim, device=device, dtype=dtype)
    try:
        activate_flash_attention_impl(IMPLEMENTATIONS[attn])
        computed = _measure(attend, head_dim=head_dim, device=device, dtype=dtype)
    except Exception as exc:  # noqa: BLE001  packages compile kernels when they first run, and raise errors of many types
        first_line = str(exc).strip().partition("\n")[0]
        restore_flash_attention_impl(_raise_warn=False)
        return f"its kernels failed on a small row ({type(exc).__name__}: {first_line})"
    for name, values in expected.items():
        exact = values.double()
        error = float((computed[name].double() - exact).norm() / exact.norm())
        if not error <= _TOLERANCE:  # true for NaN too
            restore_flash_attention_impl(_raise_warn=False)
            return f"{name} differs by {error:.1%} from that of torch's own kernels"
    return None


def _measure(attend: Attend, *, head_dim: int, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Compute attention on random numbers, the same in each call; return its output and the gradients of its inputs, by name."""
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
