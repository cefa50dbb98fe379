"""Dithered start weights round to the weights that they came from, and let small updates through."""

import pytest
import torch

from trivet.trainer.model.initial_weights import dither


def draw_weights(*shape: int) -> torch.Tensor:
    """Return weights on the grid of bfloat16, of many magnitudes and both signs."""
    generator = torch.Generator().manual_seed(7)
    scales = 2.0 ** torch.randint(-20, 4, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * scales).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_gives_the_start_weights_again(dtype: torch.dtype) -> None:
    weights = draw_weights(300, 40)
    weights[0] = 0.25  # a power of two: the spacing below it is half of that above
    weights[1] = -2.0
    weights[2, 0], weights[2, 1] = torch.inf, 0.0
    found = dither(weights.to(dtype), name="layer", first_row=0)
    assert found.dtype == torch.float32
    assert torch.equal(found.bfloat16(), weights)
    assert found[2, 1] == 0.0
    moved = found[weights.isfinite() & (weights != 0)] != weights[weights.isfinite() & (weights != 0)].float()
    assert moved.float().mean() > 0.99


def test_the_noise_fills_the_interval_that_rounds_to_a_weight() -> None:
    weights = torch.full((2000, 10), 0.1875).bfloat16()  # between two powers of two, where the spacing is 2**-10
    places = (dither(weights, name="layer", first_row=0) - weights.float()) / 2.0**-10
    assert places.min() < -0.49
    assert places.max() > 0.49
    assert places.mean().abs() < 0.01
    assert places.var() == pytest.approx(1 / 12, rel=0.03)


def test_updates_far_below_the_spacing_arrive_on_average() -> None:
    weights, update = torch.full((4000, 100), 0.1875).bfloat16(), 1e-5
    plain = (weights.float() + update).bfloat16().float() - weights.float()
    assert plain.abs().max() == 0
    dithered = (dither(weights, name="layer", first_row=0) + update).bfloat16().float() - weights.float()
    assert dithered.mean().item() == pytest.approx(update, rel=0.05)


@pytest.mark.parametrize("shape", [(3000, 100), (70000,), (5, 300, 300), (4, 2, 3)])
def test_a_shard_has_the_noise_of_its_rows(shape: tuple[int, ...]) -> None:
    weights = draw_weights(*shape)
    whole = dither(weights, name="layer", first_row=0)
    rows = shape[0]
    for first, end in ((0, rows // 2), (rows // 2, rows), (1, 3), (rows - 1, rows), (rows, rows)):
        assert torch.equal(dither(weights[first:end], name="layer", first_row=first), whole[first:end])


def test_tensors_differ_in_their_noise_and_so_do_runs_with_other_seeds() -> None:
    weights = torch.ones(100, 100).bfloat16()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first, again, other = (dither(weights, name=name, first_row=0) for name in ("a", "a", "b"))
        torch.manual_seed(2)
        reseeded = dither(weights, name="a", first_row=0)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, reseeded)


def test_weights_between_those_of_bfloat16_stay() -> None:
    weights = torch.tensor([0.1, 1 + 2.0**-20, -3.3])
    assert torch.equal(dither(weights, name="layer", first_row=0), weights)


def test_scalars_keep_their_shape_and_the_weights_that_are_given_their_values() -> None:
    weight = torch.tensor(0.5).bfloat16()
    found = dither(weight, name="scale", first_row=0)
    assert found.shape == ()
    assert found.bfloat16() == weight == 0.5
