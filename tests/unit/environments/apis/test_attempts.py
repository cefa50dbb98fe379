"""Rollouts of a group that fail, are tried again, and take too long."""

import asyncio

import pytest

from trivet.environments.apis import attempts
from trivet.environments.apis.attempts import play_group, within
from trivet.errors import RolloutFailed
from trivet.wire.rollouts import GroupId


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_RETRY_DELAY_S", 0.0)


def play(outcomes: dict[int, list[BaseException | str]]) -> list[str]:
    async def play_one(index: int) -> str:
        outcome = outcomes[index].pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return asyncio.run(play_group(play_one, num_rollouts=len(outcomes), env="toy", group_id=GroupId(3)))


def test_rollouts_come_back_in_order_whatever_attempt_they_took() -> None:
    assert play({0: [ConnectionError("down"), ConnectionError("down"), "a"], 1: ["b"]}) == ["a", "b"]


def test_a_rollout_that_fails_every_time_fails_its_group_with_the_first_error() -> None:
    with pytest.raises(RolloutFailed, match="LookupError: first") as failed:
        play({0: [LookupError("first"), SystemExit(3), ValueError("third")], 1: ["b"]})
    assert failed.value.kind == "LookupError"


def test_a_failure_that_already_names_its_kind_keeps_it() -> None:
    with pytest.raises(RolloutFailed, match=r"^no tokens$") as failed:
        play({0: [RolloutFailed("no tokens", kind="ProviderError") for _ in range(3)]})
    assert failed.value.kind == "ProviderError"


def test_a_group_that_is_not_done_in_time_fails_with_the_key_to_raise() -> None:
    async def scenario() -> None:
        async with within(0.01, env="toy", group_id=GroupId(3)):
            await asyncio.Event().wait()

    with pytest.raises(RolloutFailed, match=r"group 3 of environment 'toy' was not done after rollout_timeout_s \(0.01 s\)"):
        asyncio.run(scenario())
