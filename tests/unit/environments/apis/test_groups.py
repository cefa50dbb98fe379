"""Rollouts of a group that fail, are tried again, and take too long. The type of an error tells whether infrastructure failed."""

import asyncio
import errno
import socket
import subprocess

import httpx
import openai
import pytest
import verifiers as vf

from support.groups import make_request
from trivet.environments.apis import groups
from trivet.environments.apis.groups import (
    Stage,
    StageBoard,
    is_infrastructure,
    is_infrastructure_type,
    limit_time,
    play_group,
)
from trivet.errors import RolloutFailed


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_RETRY_DELAY_S", 0.0)


def play(outcomes: dict[int, list[BaseException | str]]) -> list[str]:
    async def play_one(index: int) -> str:
        outcome = outcomes[index].pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    played = asyncio.run(play_group(play_one, make_request(3, env="toy", num_rollouts=len(outcomes))))
    return [f"{result} after {num_retries}" for result, num_retries in played]


def test_rollouts_come_back_in_order_whatever_attempt_they_took() -> None:
    found = play({0: [ConnectionError("down"), ConnectionError("down"), "a"], 1: ["b"]})
    assert found == ["a after 2", "b after 0"]


def test_a_rollout_that_infrastructure_fails_every_time_fails_its_group_with_the_first_error() -> None:
    with pytest.raises(RolloutFailed, match="ConnectionResetError: first") as failed:
        play({0: [ConnectionResetError("first"), TimeoutError("second"), ConnectionError("third")], 1: ["b"]})
    assert (failed.value.kind, failed.value.is_infrastructure) == ("ConnectionResetError", True)


@pytest.mark.parametrize("error", [LookupError("no such answer"), SystemExit(3), vf.ToolCallError()])
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
        async with limit_time(0.01, make_request(3, env="toy")):
            await asyncio.Event().wait()

    with pytest.raises(RolloutFailed, match=r"group 3 of environment 'toy' .*rollout_timeout_s \(0.01 s\)"):
        asyncio.run(scenario())


@pytest.mark.parametrize("timeout_s", [60.0, None])
def test_a_time_out_of_the_environment_itself_is_not_that_of_the_group(timeout_s: float | None) -> None:
    async def scenario() -> None:
        async with limit_time(timeout_s, make_request(3, env="toy")):
            raise TimeoutError("the judge")

    with pytest.raises(TimeoutError, match="the judge"):
        asyncio.run(scenario())


def test_the_board_counts_rollouts_by_stage_and_the_age_of_the_oldest_scoring() -> None:
    now = 0.0
    board = StageBoard(clock=lambda: now)
    with board.stage(Stage.GENERATING, num_rollouts=4), board.stage(Stage.SCORING, num_rollouts=2):
        now = 5.0
        with board.stage(Stage.SCORING, num_rollouts=3):
            now = 7.0
            assert [board.num_rollouts(stage) for stage in Stage] == [4, 5]
            assert board.scoring_for_s() == 7.0
    assert ([board.num_rollouts(stage) for stage in Stage], board.scoring_for_s()) == ([0, 0], 0.0)


REQUEST = httpx.Request("POST", "http://server/v1/chat/completions")


def answered(status: int) -> openai.APIStatusError:
    return openai.APIStatusError("refused", response=httpx.Response(status, request=REQUEST), body=None)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class OwnSandboxError(vf.SandboxError):
    """An environment's own."""


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        TimeoutError(),
        socket.gaierror(),
        OSError(errno.EMFILE, "too many open files"),
        httpx.ConnectError("down"),
        httpx.ReadTimeout("late"),
        openai.APITimeoutError(request=REQUEST),
        answered(429),
        answered(503),
        httpx.HTTPStatusError("bad gateway", request=REQUEST, response=httpx.Response(502, request=REQUEST)),
        OwnSandboxError("gone"),
        caused(vf.ModelError(), answered(500)),
        caused(vf.ToolCallError(), httpx.ConnectError("the tool's server is down")),
        caused(vf.ToolCallError(), OwnSandboxError("gone")),
        vf.InvalidModelResponseError("no choices"),
    ],
    ids=repr,
)
def test_infrastructure(error: BaseException) -> None:
    assert is_infrastructure(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such move"),
        MemoryError(),
        SystemExit(503),
        FileNotFoundError(errno.ENOENT, "the path that the model named"),
        subprocess.TimeoutExpired("the code that the model wrote", 5.0),
        answered(400),
        httpx.HTTPStatusError(
            "the page that the model asked for", request=REQUEST, response=httpx.Response(404, request=REQUEST)
        ),
        caused(vf.ModelError(), answered(400)),
        caused(vf.ModelError(), ValueError("arguments of a tool call that are no JSON")),
        caused(vf.ToolCallError(), ZeroDivisionError()),
        vf.Error("said by the environment"),
    ],
    ids=repr,
)
def test_what_the_policy_did_may_be_the_cause(error: BaseException) -> None:
    assert not is_infrastructure(error)


def test_before_the_policy_has_said_anything_it_is_the_cause_of_nothing_but_a_refused_request() -> None:
    assert is_infrastructure(RuntimeError("no place"), has_sampled=False)
    assert not is_infrastructure(caused(vf.ModelError(), answered(400)), has_sampled=False)


def test_a_chain_that_returns_to_itself_ends() -> None:
    error = ValueError("first")
    error.__cause__ = caused(ValueError("second"), error)
    assert not is_infrastructure(error)


@pytest.mark.parametrize(
    ("name", "status", "expected"),
    [
        ("SandboxError", None, True),
        ("ToolsetError", None, True),
        ("InterceptionError", None, True),
        ("ProviderError", 503, True),
        ("ProviderError", 400, False),
        ("HarnessError", None, False),
        ("TaskError", None, False),
    ],
)
def test_the_types_that_the_v1_api_records(name: str, status: int | None, expected: bool) -> None:
    assert is_infrastructure_type([name], status_code=status, has_sampled=True) is expected
