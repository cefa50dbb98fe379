"""Take steps with losses that need more than a row: tokens chosen over the whole step, and a proximal policy."""

import math
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from support.losses import LOSSES_OF_PEERS
from trivet.config.schema.losses import ClipCovLossConfig, DecoupledLossConfig, KlCovLossConfig, LossConfig
from trivet.trainer.losses.choice import choose_tokens
from trivet.trainer.step import train_step

parse = TypeAdapter(LossConfig).validate_python
LOSSES = {
    **LOSSES_OF_PEERS,
    "importance": {"type": "importance", "preset": "geometric_token_tis", "geo_low": 0.5, "geo_high": 2.0},
}


def list_tokens(rows) -> list[tuple]:
    """Return (key of the sample, position, advantage, log-probability) of each loss token, one by one."""
    found = []
    for row in rows:
        start = 0
        for length in row.sequence_lengths_S.tolist():
            key = tuple(row.token_ids_T[start : start + length].tolist())
            for position in range(length):
                at = start + position
                if row.loss_mask_T[at]:
                    found.append((key, position, float(row.advantages_T[at]), float(row.logprobs_T[at])))
            start += length
    return found


def covariances(rows) -> dict[tuple, float]:
    tokens = list_tokens(rows)
    mean_a = math.fsum(a for *_, a, _ in tokens) / len(tokens)
    mean_q = math.fsum(q for *_, q in tokens) / len(tokens)
    return {(key, position): (a - mean_a) * (q - mean_q) for key, position, a, q in tokens}


def chosen(config, rows) -> set[tuple]:
    found = set()
    for (row_index, number), is_chosen in choose_tokens(config, rows).items():
        row = rows[row_index]
        key = tuple(row.split(row.token_ids_T)[number].tolist())
        positions = np.flatnonzero(row.split(row.loss_mask_T)[number])
        assert len(is_chosen) == len(positions)
        found |= {(key, int(position)) for position in positions[is_chosen]}
    return found


def test_kl_cov_chooses_the_highest_covariances_of_the_step_in_every_layout(oracle) -> None:
    examples = oracle.make_examples(count=9, vocab_size=100)
    expected = covariances(oracle.layouts(examples)["one row"])
    count = int(0.15 * len(expected))
    assert count > 3
    highest = set(sorted(expected, key=expected.__getitem__)[-count:])
    for name, rows in oracle.layouts(examples).items():
        assert chosen(KlCovLossConfig(cov_ratio=0.15), rows) == highest, name


def test_clip_cov_chooses_at_equal_distances_between_its_bounds_in_every_layout(oracle) -> None:
    examples = oracle.make_examples(count=9, vocab_size=100)
    expected = covariances(oracle.layouts(examples)["one row"])
    between = sorted((token for token in expected if 0.1 < expected[token] < 2.0), key=expected.__getitem__)
    count = int(0.1 * len(expected))
    assert 3 < count < len(between) < len(expected)
    picked = {between[math.floor((number + 0.5) * len(between) / count)] for number in range(count)}
    for name, rows in oracle.layouts(examples).items():
        assert chosen(ClipCovLossConfig(cov_ratio=0.1, cov_low=0.1, cov_high=2.0), rows) == picked, name


def test_clip_cov_chooses_nothing_where_no_covariance_is_between_its_bounds(oracle) -> None:
    rows = [oracle.make_row(oracle.make_examples(count=3, vocab_size=100))]
    assert chosen(ClipCovLossConfig(cov_low=1e6, cov_high=1e7), rows) == set()
    assert len(chosen(ClipCovLossConfig(cov_low=-1e6, cov_high=1e7), rows)) == 1  # a share of less than one token


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_does_not_depend_on_the_layout_of_rows(tiny_model: Path, make_learner, oracle, name: str) -> None:
    config = parse(LOSSES[name])
    examples = oracle.make_examples(count=9, vocab_size=100, prompt_length=6)
    learner = make_learner(tiny_model, loss=config)
    learner.choice = config if name in ("clip_cov", "kl_cov") else None
    found = []
    for rows in oracle.layouts(examples).values():
        for learner.micro_batch_tokens in (None, 1, 40):
            result = train_step(learner, rows, step=1)
            found.append((result.loss, result.grad_norm))
    assert found[0][1] > 0
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=3e-6)


def test_later_updates_of_a_batch_are_clipped_around_the_policy_that_it_found(tiny_model: Path, make_learner, oracle) -> None:
    rows = oracle.layouts(oracle.make_examples(count=6, vocab_size=100))["a row each"]
    config = DecoupledLossConfig(high=5.0, clip_low=0.05, clip_high=0.05)
    learner = make_learner(tiny_model, loss=config, lr=3e-3)
    first = train_step(learner, rows, step=1)
    second = train_step(learner, rows, step=1, proximal=first.logprobs)
    third = train_step(learner, rows, step=1, proximal=first.logprobs)

    def expected_loss(result) -> tuple[float, int]:
        """Return the loss by the formula, and how many tokens it clips."""
        tokens = list(zip(by_token(rows, first), by_token(rows, result), list_tokens(rows), strict=True))
        sum_of, num_clipped = 0.0, 0
        for proximal, current, (_, _, advantage, q) in tokens:
            weight = math.exp(proximal - q)
            ratio = math.exp(current - proximal)
            bounded = min(max(ratio, 0.95), 1.05)
            num_clipped += bounded * advantage < ratio * advantage
            sum_of += -(weight if weight <= 5.0 else 0.0) * min(ratio * advantage, bounded * advantage)
        return sum_of / len(tokens), num_clipped

    assert [expected_loss(result)[1] > 0 for result in (first, second, third)] == [False, True, True]
    for result in (first, second, third):
        assert result.loss == pytest.approx(expected_loss(result)[0], rel=1e-5)
    assert second.loss != first.loss != third.loss


def by_token(rows, result) -> list[float]:
    """Return the log-probabilities of a step in the order of `list_tokens`: the trainer computes rows in another order."""
    lengths = [int(np.count_nonzero(row.loss_mask_T)) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: -rows[index].num_tokens)
    parts = dict(zip(order, result.logprobs, strict=True))
    assert [len(parts[index]) for index in range(len(rows))] == lengths
    return [float(value) for index in range(len(rows)) for value in parts[index]]
