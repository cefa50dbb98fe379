"""A taskset of the v1 API whose tasks say how the conversation goes. Its harness runs in this process and asks over HTTP.

`way` of a task: `talk` says the next line after each reply; `tools` calls `add` until a reply calls nothing; `branch` continues the
first reply with each line by itself; `stream` is `talk` over server-sent events; `anthropic` asks in another dialect; `program`
starts a program that asks nothing and does not end; `crash` and `lose` talk and then fail, as a bug and as infrastructure;
`unlaunchable` fails before it asks.
"""

import asyncio
import json
import sys

import httpx
import verifiers.v1 as vf

seen: list[vf.Trace] = []
"""Traces that were scored in this process."""

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


class TalkData(vf.TaskData):
    way: str = "talk"
    lines: list[str] = []
    score: str = "1.0"
    """A number, or how the reward function fails."""
    has_odd_metrics: bool = False
    """Metrics, and a reward of weight 0, return what is no number."""


class TalkTask(vf.Task[TalkData]):
    @vf.reward
    async def scored(self, trace: vf.Trace) -> float:
        seen.append(trace)
        match self.data.score:
            case "raise":
                raise LookupError("no such answer")
            case "exit":
                sys.exit(3)
            case "none":
                return None  # type: ignore[return-value]
            case "list":
                return [1.0]  # type: ignore[return-value]
            case "tuple":
                return (1.0, "why")  # type: ignore[return-value]
            case "text":
                return "1.0"  # type: ignore[return-value]
            case "named":
                return {"first": 0.25, "second": 0.5}  # type: ignore[return-value]
            case "nested":
                return {"first": [0.25]}  # type: ignore[return-value]
            case "hang":
                await asyncio.Event().wait()
        return float(self.data.score)

    @vf.reward(weight=0.0)
    async def weightless(self, trace: vf.Trace) -> float:
        return float("nan") if self.data.has_odd_metrics else {}  # type: ignore[return-value]

    @vf.metric
    async def odd(self, trace: vf.Trace) -> float:
        return [1.0] if self.data.has_odd_metrics else {}  # type: ignore[return-value]

    @vf.metric
    async def num_replies(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class TalksConfig(vf.TasksetConfig):
    rows: list[dict] = [{}]


class TalksTaskset(vf.Taskset[TalkTask, TalksConfig]):
    def load(self) -> list[TalkTask]:
        question = [{"role": "user", "content": "What is two and three?"}]
        return [TalkTask(TalkData.model_validate({"prompt": question, **row}), self.config.task) for row in self.config.rows]


class TalkHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        if data.way == "program":
            return await runtime.run_program(["sleep", "600"], {})
        if data.way == "unlaunchable":
            raise RuntimeError("no place for the harness")
        _, prompt = self.resolve_prompt(data)
        messages = [message.model_dump(exclude_none=True) for message in prompt or []]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=30.0) as client:
            try:
                await getattr(self, f"_{data.way}")(Asker(client, endpoint), messages, data)
            except httpx.HTTPStatusError as exc:
                return vf.ProgramResult(exit_code=1, stdout="", stderr=exc.response.text)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _talk(self, asker: "Asker", messages: list[dict], data: TalkData) -> None:
        messages.append(await asker.ask(messages))
        for line in data.lines:
            messages.append({"role": "user", "content": line})
            messages.append(await asker.ask(messages))

    async def _crash(self, asker: "Asker", messages: list[dict], data: TalkData) -> None:
        await self._talk(asker, messages, data)
        raise KeyError("what the reply should have had")

    async def _lose(self, asker: "Asker", messages: list[dict], data: TalkData) -> None:
        await self._talk(asker, messages, data)
        raise vf.SandboxError("the sandbox is gone")

    async def _stream(self, asker: "Asker", messages: list[dict], data: TalkData) -> None:
        asker.streams = True
        await self._talk(asker, messages, data)

    async def _tools(self, asker: "Asker", messages: list[dict], data: TalkData) -> None:
        while (reply := await asker.ask(messages, tools=[ADD])).get("tool_calls"):
            messages.append(reply)
            for call in reply["tool_calls"]:
                given = json.loads(call["function"]["arguments"])
                said = f"{given['a']} + {given['b']} = {given['a'] + given['b']}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})

    async def _branch(self, asker: "Asker", messages: list[dict], data: TalkData) -> None:
        messages.append(await asker.ask(messages))
        for line in data.lines:
            await asker.ask([*messages, {"role": "user", "content": line}])

    async def _anthropic(self, asker: "Asker", messages: list[dict], data: TalkData) -> None:
        headers = {"x-api-key": asker.client.headers["Authorization"].removeprefix("Bearer ")}
        body = {"model": "m", "max_tokens": 8, "messages": messages}
        (await asker.client.post(f"{asker.endpoint}/messages", json=body, headers=headers)).raise_for_status()


class Asker:
    """Asks the interception endpoint."""

    def __init__(self, client: httpx.AsyncClient, endpoint: str) -> None:
        self.client = client
        self.endpoint = endpoint
        self.streams = False

    async def ask(self, messages: list[dict], **fields: object) -> dict:
        body = {"model": "m", "messages": messages, "stream": self.streams, **fields}
        response = await self.client.post(f"{self.endpoint}/chat/completions", json=body)
        response.raise_for_status()
        if not self.streams:
            return response.json()["choices"][0]["message"]
        [chunk] = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        return json.loads(chunk)["choices"][0]["delta"]


__all__ = ["TalkHarness", "TalksTaskset"]
