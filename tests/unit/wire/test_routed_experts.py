"""Experts survive compression as sets, and damage is refused."""

import base64
import io

import msgspec
import numpy as np
import pytest

from trivet.errors import MessageRefused
from trivet.wire.codec import decode, encode
from trivet.wire.experts import UNKNOWN, RoutedExperts, join_experts, read_experts


def draw(num_tokens: int, *, num_experts: int, seed: int = 0) -> np.ndarray:
    scores = np.random.default_rng(seed).random((num_tokens, 3, num_experts))
    return np.argsort(scores, axis=-1)[..., :4]


@pytest.mark.parametrize(("num_experts", "item_bytes"), [(8, 1), (256, 1), (512, 2)])
def test_the_set_of_each_token_and_layer_comes_back_over_the_wire(num_experts: int, item_bytes: int) -> None:
    experts_TLK = draw(300, num_experts=num_experts)
    routed = decode(encode(RoutedExperts.compress(experts_TLK)), RoutedExperts)
    assert routed.item_bytes == item_bytes
    assert len(routed.data) < experts_TLK.size * item_bytes
    np.testing.assert_array_equal(routed.decompress(300), np.sort(experts_TLK, axis=-1))


def test_a_sample_may_have_fewer_tokens_or_more() -> None:
    experts_TLK = draw(10, num_experts=8)
    routed = RoutedExperts.compress(experts_TLK)
    np.testing.assert_array_equal(routed.decompress(4), np.sort(experts_TLK[:4], axis=-1))
    assert (routed.decompress(12)[10:] == UNKNOWN).all()


def test_a_token_keeps_the_experts_of_the_first_turn_that_computed_it() -> None:
    first, second = draw(9, num_experts=8), draw(15, num_experts=8, seed=1)
    joined = join_experts([RoutedExperts.compress(first), RoutedExperts.compress(second)])
    np.testing.assert_array_equal(joined.decompress(15), np.sort(np.concatenate([first, second[9:]]), axis=-1))


@pytest.mark.parametrize("change", [{"data": b"no zlib"}, {"shape": (10, 3, 5)}, {"shape": (10, 3, 3)}, {"item_bytes": 4}])
def test_damaged_data_is_refused(change: dict[str, object]) -> None:
    routed = RoutedExperts.compress(draw(10, num_experts=8))
    with pytest.raises(MessageRefused, match="experts"):
        msgspec.structs.replace(routed, **change).decompress(10)


def test_the_field_of_vllm_is_read_and_anything_else_refused() -> None:
    experts_TLK = draw(5, num_experts=8).astype(np.uint8)
    with io.BytesIO() as buffer:
        np.save(buffer, experts_TLK)
        text = base64.b64encode(buffer.getvalue()).decode()
    np.testing.assert_array_equal(read_experts(text), experts_TLK)
    for wrong in ("?", text[:40], base64.b64encode(b"no array").decode()):
        with pytest.raises(MessageRefused, match="routed_experts"):
            read_experts(wrong)
