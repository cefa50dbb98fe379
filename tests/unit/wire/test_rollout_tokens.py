import zlib

import msgspec
import numpy as np
import pytest

from support.groups import make_group, make_sample
from trivet.algorithms.filters import RolloutFilter, RolloutFilters, mask_rollouts
from trivet.errors import MessageRefused
from trivet.wire.rollout_tokens import pack_tokens, unpack_tokens
from trivet.wire.rollouts import Rollout, Sample


def make_rollouts() -> list[Rollout]:
    return [
        Rollout(index=0, reward=1.0, samples=[make_sample(prompt=3, completion=5, version=2, newest=3)]),
        Rollout(index=1, reward=0.0, samples=[]),
        Rollout(index=2, reward=0.0, samples=[make_sample(prompt=9, completion=4), make_sample(prompt=1, completion=17)]),
    ]


def test_tokens_masks_and_versions_come_back_exactly():
    rollouts = make_rollouts()
    unpacked = unpack_tokens(pack_tokens(rollouts))
    assert [len(samples) for samples in unpacked] == [1, 0, 2]
    for rollout, samples in zip(rollouts, unpacked, strict=True):
        for sample, tokens in zip(rollout.samples, samples, strict=True):
            np.testing.assert_array_equal(tokens.token_ids_T, sample.token_ids_T)
            np.testing.assert_array_equal(tokens.is_sampled_T, sample.loss_mask_T)
            assert tokens.versions == sample.versions


def test_log_probabilities_keep_three_digits():
    logprobs_T = -np.geomspace(1e-4, 60.0, 500, dtype=np.float32)
    mask_T = np.ones(500, dtype=bool)
    sample = Sample(
        token_ids_T=np.arange(500, dtype=np.int32), loss_mask_T=mask_T, logprobs_T=logprobs_T, versions=[], temperature=1.0
    )
    [[tokens]] = unpack_tokens(pack_tokens([Rollout(index=0, reward=0.0, samples=[sample])]))
    # Half precision rounds to 11 significant bits: a relative error of at most 2**-11.
    np.testing.assert_allclose(tokens.logprobs_N, logprobs_T, rtol=2**-11)


def test_a_rollout_that_a_filter_masked_keeps_the_log_probabilities_of_what_was_sampled():
    group = make_group(0)
    group.rollouts[1].samples[0].is_truncated = True
    mask_rollouts(group, RolloutFilters(enforced=frozenset({RolloutFilter.TRUNCATED})))
    [trained], [masked] = unpack_tokens(pack_tokens(group.rollouts))
    assert (trained.is_masked, masked.is_masked) == (False, True)
    for tokens in (trained, masked):
        assert tokens.is_sampled_T.tolist() == [False] * 3 + [True] * 4
        assert tokens.logprobs_N.tolist() == [-1.0] * 4


def test_a_file_from_before_masked_rollouts_were_told_apart_is_read():
    rollouts = make_rollouts()[:1]
    entries = msgspec.msgpack.decode(zlib.decompress(pack_tokens(rollouts)))
    old = zlib.compress(msgspec.msgpack.encode([[sample[:4] for sample in samples] for samples in entries]))
    [[tokens]] = unpack_tokens(old)
    assert not tokens.is_masked
    np.testing.assert_array_equal(tokens.token_ids_T, rollouts[0].samples[0].token_ids_T)


@pytest.mark.parametrize("cut", [0, 1, 20, -1])
def test_a_file_that_was_cut_is_refused(cut: int):
    with pytest.raises(MessageRefused, match=r"tokens\.msgpack\.z cannot be read"):
        unpack_tokens(pack_tokens(make_rollouts())[:cut])


def test_something_else_is_refused():
    with pytest.raises(MessageRefused):
        unpack_tokens(b"{}\n")
