"""What a server read and sampled, turn by turn, and what it means that samples are made of exactly that."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from trivet.wire.rollouts import Rollout
from trivet.wire.versions import VersionRun, join_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTurn:
    """The tokens that a server read and sampled in one turn."""

    text: str
    """The conversation as the template writes it."""
    read: list[int]
    sampled: list[int]
    logprobs: list[float]
    versions: list[VersionRun]


def assert_trains_on_what_was_sampled(
    rollout: Rollout, served: Sequence[ServedTurn], *, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Check that a sample has every turn once: after exactly the tokens that were read, as it was sampled, with its own
    versions and log-probabilities. Check that the tokens read are those of the template's text."""
    turns = [turn for turn in served if turn.sampled]
    for sample in rollout.samples:
        token_ids = sample.token_ids_T.tolist()
        end, versions = 0, []
        is_trained = np.zeros(len(token_ids), dtype=np.bool_)
        while end < len(token_ids):
            turn = turns.pop(0)
            start, end = len(turn.read), len(turn.read) + len(turn.sampled)
            assert _visible(tokenizer.decode(turn.read, skip_special_tokens=False)) == _visible(turn.text)
            assert token_ids[:end] == turn.read + turn.sampled
            assert sample.logprobs_T[start:end] == pytest.approx(turn.logprobs)
            is_trained[start:end] = True
            versions.append(turn.versions)
        assert sample.loss_mask_T.tolist() == is_trained.tolist()
        assert not sample.logprobs_T[~is_trained].any()
        assert sample.versions == join_versions(versions)
    assert turns == []


def _visible(text: str) -> str:
    return "".join(text.replace("\ufffd", "").split())
