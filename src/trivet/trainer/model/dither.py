"""Spreads start weights that lie on the grid of bfloat16, so that updates smaller than its spacing reach the model that computes.

Called by `trainer.model.initial_weights`. Forward, backward and the server use weights rounded to bfloat16, whose spacing is 1/128
to 1/256 of a weight. A weight from a bfloat16 file lies exactly in the middle of the interval that rounds to it. Updates of 1e-5 to
a weight of 0.1 change nothing before they have added up to 2.4e-4. So for tens of steps the trainer learns, and no process computes
with what it learnt. Noise that is uniform within that interval leaves the start model bit for bit as it was. An update of a
hundredth of the spacing then moves one rounded weight of a hundred by a whole spacing: on average over the weights, the update.

The idea is that of dither before a quantizer: L. Schuchman, "Dither signals and their effect on quantization noise", 1964. Here the
noise is drawn once, for the start, instead of at every rounding as in stochastic rounding, so a step costs nothing more.
"""

import torch

from trivet.trainer.model.weight_files import seed_of

_FRACTION_BITS = 16
"""Bits of float32's fraction that bfloat16 does not have."""
_MAX_NOISE = 2 ** (_FRACTION_BITS - 1) - 1
"""The largest noise, in float32 spacings: one less than half a bfloat16 spacing, which may round to the neighbour."""
_BLOCK_VALUES = 2**15
"""Values whose noise is drawn from one seed, rounded down to whole rows. A rank draws little more than its shard's noise.
torch adds more values than this in several threads, and starting these costs more than the addition."""


def dither(rows: torch.Tensor, *, name: str, first_row: int) -> torch.Tensor:
    """Return rows of a weight with noise, where bfloat16 can hold the weight exactly; rounding to bfloat16 gives `rows` again.

    Args:
        rows: [N, ...], or a scalar, on the CPU, any floating-point dtype.
        name: the tensor's. With the run's seed and the row it fixes the noise, over however many ranks the tensor is sharded.
        first_row: the row of the tensor at which `rows` begins.

    Returns:
        float32. Zeros and values between those of bfloat16 are as they were.
    """
    dithered = rows.to(torch.float32, copy=True)
    values = dithered.view(1) if dithered.ndim == 0 else dithered
    if not values.numel():
        return dithered
    block_rows = max(1, _BLOCK_VALUES // values[0].numel())
    end_row = first_row + len(values)
    for block in range(first_row // block_rows, -(-end_row // block_rows)):
        block_start = block * block_rows
        start, end = max(first_row, block_start), min(end_row, block_start + block_rows)
        noise = _draw_noise((block_rows, *values.shape[1:]), seed=seed_of(f"{name}:{block}"))
        _add_noise(values[start - first_row : end - first_row], noise[start - block_start : end - block_start])
    return dithered


def _draw_noise(shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    return torch.randint(-_MAX_NOISE, _MAX_NOISE + 1, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def _add_noise(values: torch.Tensor, noise: torch.Tensor) -> None:
    is_on_grid = (values.bfloat16().float() == values) & (values != 0) & values.isfinite()
    # Neighbouring floats of one sign have neighbouring bits, across powers of two as well.
    values.view(torch.int32).add_(noise.mul_(is_on_grid))
