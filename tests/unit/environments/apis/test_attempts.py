"""Rollouts of a group that fail, are tried again, and take too long."""

import asyncio

import pytest
import verifiers as vf

from trivet.environments.apis import attempts
from trivet.environments.apis.attempts import limit_time, play_group
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

    played = asyncio.run(play_group(play_one, num_rollouts=len(outcomes), env="toy", group_id=GroupId(3)))
    return [f"{result} after {num_retries}" for result, num_retries in played]


def test_rollouts_come_back_in_order_whatever_attempt_they_took() -> None:
    found = play({0: [ConnectionError("down"), ConnectionError("down"), "a"], 1: ["b"]})
    assert found == ["a after 2", "b after 0"]


def test_a_rollout_that_infrastructure_fails_every_time_fails_its_group_with_the_first_error() -> None:
    with pytest.raises(RolloutFailed, match="ConnectionResetError: first") as failed:
        play({0: [ConnectionResetError("first"), TimeoutError("second"), ConnectionError("third")], 1: ["b"]})
    assert (failed.value.kind, failed.value.is_infrastructure) == ("ConnectionResetError", True)


@pytest.mark.parametrize(
    "error", [LookupError("no such answer"), SystemExit(3), FileNotFoundError(2, "gone"), vf.ToolCallError()]
)
def test_what_the_policys_answer_may_have_caused_is_not_played_again(error: BaseException) -> None:
    outcomes: dict[int, list[BaseException | str]] = {0: [ConnectionError("down"), error, "a better answer"]}
    with pytest.raises(RolloutFailed, match=type(error).__name__) as failed:
        play(outcomes)
    assert (failed.value.kind, failed.value.is_infrastructure) == (type(error).__name__, False)
    assert outcomes[0] == ["a better answer"]


@pytest.mark.parametrize("is_infrastructure", [True, False])
def test_a_failure_that_already_names_its_kind_and_cause_keeps_them(is_infrastructure: bool) -> None:
    failures = [RolloutFailed("no tokens", kind="ProviderError", is_infrastructure=is_infrastructure) for _ in range(3)]
    left: list[BaseException | str] = list(failures)
    with pytest.raises(RolloutFailed, match=r"^no tokens$") as failed:
        play({0: left})
    assert failed.value is failures[0]
    assert len(left) == (0 if is_infrastructure else 2)


def test_a_group_that_is_not_done_in_time_fails_with_the_key_to_raise() -> None:
    async def scenario() -> None:
        async with limit_time(0.01, env="toy", group_id=GroupId(3)):
            await asyncio.Event().wait()

    with pytest.raises(RolloutFailed, match=r"group 3 of environment 'toy' was not done after rollout_timeout_s \(0.01 s\)"):
        asyncio.run(scenario())
