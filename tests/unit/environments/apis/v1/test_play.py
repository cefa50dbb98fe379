"""The turn behind a sampled message is found by the message."""

from dataclasses import dataclass

import pytest

pytest.importorskip("verifiers.v1.interception", reason="needs verifiers 0.4")

from trivet.environments.apis.turns import Turn
from trivet.environments.apis.v1.play import ServedTurns


@dataclass
class Message:
    """Two with the same text are equal, and cannot be hashed, as verifiers' messages."""

    text: str


def turn(token: int) -> Turn:
    return Turn(prompt_ids=[1], completion_ids=[token], logprobs=[-0.5], versions=[])


def test_equal_messages_have_turns_of_their_own_and_a_copy_has_none() -> None:
    turns = ServedTurns()
    first, second = Message("yes"), Message("yes")
    turns.record("a", first, turn(7))
    turns.record("a", second, turn(8))
    assert turns.find("a", first) == turn(7)
    assert turns.find("a", second) == turn(8)
    assert turns.find("a", Message("yes")) is None
    assert turns.find("b", first) is None


def test_the_turns_of_a_trace_that_is_over_are_dropped() -> None:
    turns = ServedTurns()
    message = Message("yes")
    turns.record("a", message, turn(7))
    turns.record("b", message, turn(8))
    turns.forget("a")
    turns.forget("a")
    assert turns.find("a", message) is None
    assert turns.find("b", message) == turn(8)
    assert len(turns) == 1
