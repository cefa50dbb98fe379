"""Plays a real verifiers environment with scripted replies."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

import verifiers as vf
from openai import AsyncOpenAI


def tool_call(name: str, **arguments: Any) -> vf.ToolCall:
    return vf.ToolCall(id=f"call-{name}", name=name, arguments=json.dumps(arguments))


class ScriptedPolicy(vf.OpenAIChatCompletionsClient):
    """Answers every request with the next reply, and fails when none is left."""

    def __init__(self, replies: Sequence[str | vf.ToolCall]) -> None:
        super().__init__(AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="none"))
        self._replies = list(replies)

    async def get_response(
        self, prompt: vf.Messages, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> vf.Response:
        reply = self._replies.pop(0)
        message = vf.ResponseMessage(
            content=reply if isinstance(reply, str) else "",
            tool_calls=None if isinstance(reply, str) else [reply],
            finish_reason="stop" if isinstance(reply, str) else "tool_calls",
            is_truncated=False,
        )
        return vf.Response(id="scripted", created=0, model=model, message=message)


def play(env: vf.Environment, replies: Sequence[str | vf.ToolCall], *, example: dict[str, Any] | None = None) -> vf.State:
    """Return the scored state of one rollout of `example`, or of the first training example."""

    async def rollout() -> vf.State:
        played = cast(Any, example or env.get_dataset()[0])
        state = await env.rollout(played, ScriptedPolicy(replies), "scripted", {})
        if state["error"]:
            raise state["error"]
        await env.rubric.score_group([state])
        return state

    return asyncio.run(rollout())


def said(state: vf.State, role: str) -> list[str]:
    """Return the contents of `role`'s messages after the prompt."""
    return [str(message.content) for message in state["completion"] if message.role == role]
