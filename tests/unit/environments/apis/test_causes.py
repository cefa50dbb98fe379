"""The type of an error tells what failed: infrastructure, or the environment's code on what the policy did."""

import errno
import socket
import subprocess
from types import SimpleNamespace

import httpx
import openai
import pytest
import verifiers as vf

from trivet.environments.apis.causes import is_infrastructure, names_infrastructure

REQUEST = httpx.Request("POST", "http://server/v1/chat/completions")


def answered(status: int) -> openai.APIStatusError:
    response = httpx.Response(status, request=REQUEST)
    return openai.APIStatusError("refused", response=response, body=None)


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
        openai.APIConnectionError(request=REQUEST),
        openai.APITimeoutError(request=REQUEST),
        answered(429),
        answered(503),
        httpx.HTTPStatusError("bad gateway", request=REQUEST, response=httpx.Response(502, request=REQUEST)),
        OwnSandboxError("gone"),
        vf.InfraError(),
        caused(vf.ModelError(), answered(500)),
        caused(vf.ModelError(), httpx.ConnectError("down")),
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
        KeyError("answer"),
        RecursionError(),
        MemoryError(),
        SystemExit(503),
        FileNotFoundError(errno.ENOENT, "the path that the model named"),
        subprocess.TimeoutExpired("the code that the model wrote", 5.0),
        answered(400),
        answered(404),
        httpx.HTTPStatusError(
            "the page that the model asked for", request=REQUEST, response=httpx.Response(404, request=REQUEST)
        ),
        caused(vf.ModelError(), answered(400)),
        caused(vf.ModelError(), ValueError("arguments of a tool call that are no JSON")),
        caused(vf.ToolParseError(), ValueError("no JSON")),
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
    ("recorded", "expected"),
    [
        (SimpleNamespace(type="SandboxError", status=None), True),
        (SimpleNamespace(type="ToolsetError", status=None), True),
        (SimpleNamespace(type="InterceptionError", status=None), True),
        (SimpleNamespace(type="ProviderError", status=503), True),
        (SimpleNamespace(type="ProviderError", status=400), False),
        (SimpleNamespace(type="HarnessError", status=None), False),
        (SimpleNamespace(type="TaskError", status=None), False),
        (SimpleNamespace(type="EnvError", status=None), False),
    ],
)
def test_the_types_that_the_v1_api_records(recorded: SimpleNamespace, expected: bool) -> None:
    assert names_infrastructure([recorded.type], status_code=recorded.status, has_sampled=True) is expected
