"""Provides a server that answers at once inside the process, an environment for it, and policies that are always ready.

Used by scripts/bench/orchestrator.py, so that only the orchestrator is left to measure. A worker process loads this file as an
environment: `load_environment`.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI

from trivet.environments.apis.v0.play import ModelClient
from trivet.orchestrator.dispatcher import Dispatcher
from trivet.orchestrator.loop import Loop
from trivet.wire.versions import PolicyVersion, Step

NUM_EXAMPLES = 1000
ROOT = "http://server"


class OneServer:
    """A server that is always available and serves the start model."""

    def pick(self, *, num_rollouts: int) -> str:
        """Return the server."""
        return ROOT

    def release(self, root: str, *, num_rollouts: int) -> None:
        """Do nothing."""

    async def is_at_fault(self, root: str) -> bool:
        """Return False: the server never fails."""
        return False

    def subscribe(self, *, on_down: Callable[[str], None], on_up: Callable[[], None]) -> None:
        pass


class PromptPolicies:
    """Serves the policy of a step once its batch was received. Stands in for trainer and PolicyWatcher."""

    version = PolicyVersion(0)
    step = Step(1)
    last_load_s = 0.0

    async def run(self) -> None:
        """Wait until cancelled."""
        await asyncio.Event().wait()


def dispatcher_of(loop: Loop) -> Dispatcher:
    """Return the dispatcher of a loop that runs environments."""
    assert isinstance(loop.dispatcher, Dispatcher)
    return loop.dispatcher


POLICIES = PromptPolicies()
"""One loop runs at a time; the environments say which policy sampled their tokens."""


def instant_client(num_tokens: int) -> ModelClient:
    """Return a client whose server answers at once, in this process."""
    half = num_tokens // 2
    completion = list(range(half, num_tokens))
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "ok"},
        "token_ids": completion,
        "logprobs": {"content": [{"token": str(i), "logprob": -0.5, "top_logprobs": []} for i in completion]},
    }
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
        "prompt_token_ids": list(range(half)),
        "usage": {"prompt_tokens": half, "completion_tokens": len(completion), "total_tokens": num_tokens},
    }
    answers: dict[int, bytes] = {}

    def answer(_: httpx.Request) -> httpx.Response:
        version = POLICIES.version
        if version not in answers:
            choice["policy_versions"] = [[version, len(completion)]]
            answers[version] = json.dumps(body).encode()
        return httpx.Response(200, content=answers[version], headers={"content-type": "application/json"})

    transport = httpx.MockTransport(answer)
    http: Any = httpx.AsyncClient(transport=transport)
    return ModelClient(AsyncOpenAI(base_url=f"{ROOT}/v1", api_key="EMPTY", http_client=http, max_retries=0))


class SelfServedEnv(vf.SingleTurnEnv):
    """An environment whose rollouts ask the instant server in their own process, whatever server they are given."""

    def __init__(self, *, num_tokens: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._client = instant_client(num_tokens)

    async def setup_state(self, state: Any) -> Any:
        """Take the instant server for the client that the rollout was given."""
        state["client"] = self._client
        return state


def load_environment(num_tokens: int = 64) -> vf.Environment:
    """Return the environment of a worker process."""
    return SelfServedEnv(num_tokens=num_tokens, **environment_arguments())


def make_environment() -> vf.Environment:
    """Return an environment whose rewards cost nothing."""
    return vf.SingleTurnEnv(**environment_arguments())


def environment_arguments() -> dict[str, Any]:
    """Return the data set and the rubric."""
    rows = [{"prompt": [{"role": "user", "content": f"question {index}"}], "answer": "ok"} for index in range(NUM_EXAMPLES)]

    def is_right(completion: Any, answer: str, **_: object) -> float:
        return float(completion[-1]["content"] == answer)

    return {"dataset": Dataset.from_list(rows), "rubric": vf.Rubric(funcs=[is_right])}
