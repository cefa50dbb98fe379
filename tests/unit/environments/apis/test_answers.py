"""Tokens of a chat completion are read as they are, or refused."""

from typing import Any

import pytest

from trivet.environments.apis.answers import read_turn
from trivet.errors import RolloutFailed
from trivet.wire.versions import VersionRun


def answer(**changes: Any) -> dict[str, Any]:
    choice = {
        "finish_reason": "length",
        "token_ids": [7, 8, 9],
        "logprobs": {"content": [{"logprob": -0.25}, {"logprob": -0.5}, {"logprob": -1.0}]},
        "policy_versions": [[3, 1], [4, 2]],
        **changes,
    }
    return {"prompt_token_ids": [1, 2], "choices": [choice]}


def test_tokens_log_probabilities_and_versions_are_those_of_the_answer() -> None:
    turn = read_turn(answer())
    assert (turn.prompt_ids, turn.completion_ids, turn.logprobs) == ([1, 2], [7, 8, 9], [-0.25, -0.5, -1.0])
    assert turn.versions == [VersionRun(3, 1), VersionRun(4, 2)]
    assert turn.is_truncated
    assert not read_turn(answer(finish_reason="stop")).is_truncated


def test_a_completion_without_tokens_is_one() -> None:
    turn = read_turn(answer(token_ids=[], logprobs=None, policy_versions=[]))
    assert (turn.completion_ids, turn.versions) == ([], [])


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": None},
        {"policy_versions": None},
        {"policy_versions": [[3, 2]]},
        {"logprobs": None},
        {"token_ids": [7, 8]},
    ],
)
def test_an_answer_that_lacks_something_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RolloutFailed, match=r"is it `uv run inference`"):
        read_turn(answer(**changes))
