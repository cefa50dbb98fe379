"""The sessions of agents, asked by the real clients of OpenAI and Anthropic over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest

from support.processes import wait_until
from trivet.environments.apis.agents.formats import ModelRequest
from trivet.environments.apis.agents.server import AgentServer
from trivet.environments.apis.agents.session import AgentSession, SessionLimits
from trivet.errors import RolloutFailed

ASKED = [{"role": "user", "content": "What is 6 times 7?"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "twice", "description": "Doubles.", "parameters": PARAMETERS}}


class Script:
    """The server: answers with the next reply, one token for each of its first characters, and remembers what it was asked."""

    def __init__(self, *replies: str | list[tuple[str, str]] | Exception, wait: asyncio.Event | None = None) -> None:
        self.replies = list(replies)
        self.asked: list[ModelRequest] = []
        self.known: list[Sequence[int]] = []
        self.wait = wait

    async def __call__(self, request: ModelRequest, number: int, known: Sequence[int]) -> dict[str, Any]:
        self.asked.append(request)
        self.known.append(known)
        if self.wait is not None:
            await self.wait.wait()
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        message: dict[str, Any] = {"role": "assistant", "content": reply if isinstance(reply, str) else None}
        if isinstance(reply, list):
            message["tool_calls"] = [
                {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for index, (name, arguments) in enumerate(reply)
            ]
        tokens = [ord(character) for character in json.dumps(reply)[:1000]]
        return {
            "model": "m",
            "prompt_token_ids": [1, 2, 3],
            "choices": [
                {
                    "message": message,
                    "finish_reason": "stop" if isinstance(reply, str) else "tool_calls",
                    "token_ids": tokens,
                    "logprobs": {"content": [{"logprob": -0.5} for _ in tokens]},
                    "policy_versions": [[0, len(tokens)]],
                }
            ],
        }


@asynccontextmanager
async def served(script: Script, limits: SessionLimits | None = None) -> AsyncIterator[tuple[AgentSession, str, AgentServer]]:
    server = AgentServer("127.0.0.1", model="m")
    session = AgentSession(script, limits or SessionLimits())
    async with server.listening(), server.serving(session) as address:
        yield session, address, server


def openai_client(session: AgentSession, address: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=session.key, **options)


def anthropic_client(session: AgentSession, address: str, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=address, api_key=session.key, **options)


def test_openai_chat_calls_tools_in_parallel_and_continues_from_the_tokens_that_it_sampled() -> None:
    async def run() -> None:
        script = Script([("twice", '{"a": 3}'), ("twice", '{"a": 4}')], "14")
        async with served(script) as (session, address, _), openai_client(session, address) as client:
            first = await client.chat.completions.create(model="any", messages=ASKED, tools=[CHAT_TOOL])
            message = first.choices[0].message
            assert [call.function.arguments for call in message.tool_calls or []] == ['{"a": 3}', '{"a": 4}']
            results = [{"role": "tool", "tool_call_id": f"call_{index}", "content": str(index)} for index in (0, 1)]
            conversation: Any = [*ASKED, message.model_dump(exclude_none=True), *results]
            async with client.chat.completions.stream(model="any", messages=conversation, tools=[CHAT_TOOL]) as stream:
                assert (await stream.get_final_completion()).choices[0].message.content == "14"
            assert [recorded.is_delivered for recorded in session.turns] == [True, True]
            turn = session.turns[0].turn
            assert script.known == [[], [*turn.prompt_ids, *turn.completion_ids]]
            assert script.asked[1].messages[-2:] == results

    asyncio.run(run())


def test_openai_responses_speak_the_same_conversation_whole_and_as_a_stream() -> None:
    async def run() -> None:
        script = Script([("twice", '{"a": 3}'), ("twice", '{"a": 4}')], "14")
        tool: Any = {"type": "function", "name": "twice", "description": "Doubles.", "parameters": PARAMETERS, "strict": False}
        async with served(script) as (session, address, _), openai_client(session, address) as client:
            first = await client.responses.create(model="any", instructions="Be short.", input="Go", tools=[tool])
            calls = [item for item in first.output if item.type == "function_call"]
            assert [call.arguments for call in calls] == ['{"a": 3}', '{"a": 4}']
            results = [{"type": "function_call_output", "call_id": call.call_id, "output": "6"} for call in calls]
            given: Any = [{"role": "user", "content": "Go"}, *(item.model_dump() for item in first.output), *results]
            async with client.responses.stream(model="any", instructions="Be short.", input=given, tools=[tool]) as stream:
                assert (await stream.get_final_response()).output_text == "14"
            assert [message["role"] for message in script.asked[1].messages] == ["system", "user", "assistant", "tool", "tool"]
            assert script.known[1]
            with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
                await client.responses.create(model="any", input="more", previous_response_id="resp_1")

    asyncio.run(run())


def test_tools_of_responses_that_are_no_functions_are_offered_as_functions_and_called_in_their_own_form() -> None:
    async def run() -> None:
        patch = "*** Begin Patch"
        script = Script([("apply_patch", json.dumps({"input": patch})), ("team__spawn", '{"a": 1}')], "done")
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: PATCH"}
        spawn = {"type": "function", "name": "spawn", "parameters": PARAMETERS, "strict": False}
        tools: Any = [
            {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": grammar},
            {"type": "namespace", "name": "team", "description": "Agents.", "tools": [spawn]},
        ]
        async with served(script) as (session, address, _), openai_client(session, address) as client:
            async with client.responses.stream(model="any", input="Go", tools=tools) as stream:
                kinds = [event.type async for event in stream]
                first = await stream.get_final_response()
            custom, function = first.output
            assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "apply_patch", patch)
            assert (function.type, function.name, function.namespace) == ("function_call", "spawn", "team")
            assert "response.custom_tool_call_input.done" in kinds
            offered = [tool["function"] for tool in script.asked[0].tools]
            assert [function["name"] for function in offered] == ["apply_patch", "team__spawn"]
            assert offered[0]["description"] == "Patches.\nstart: PATCH"
            results = [
                {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "ok"},
                {"type": "function_call_output", "call_id": function.call_id, "output": "ok"},
            ]
            given: Any = [{"role": "user", "content": "Go"}, *(item.to_dict() for item in first.output), *results]
            assert (await client.responses.create(model="any", input=given, tools=tools)).output_text == "done"
            assert script.known[1]  # the conversation goes on from the tokens of the calls

    asyncio.run(run())


def test_anthropic_messages_call_tools_in_parallel_whole_and_as_a_stream() -> None:
    async def run() -> None:
        script = Script([("twice", '{"a": 3}'), ("twice", '{"a": 4}')], "14")
        tool: Any = {"name": "twice", "description": "Doubles.", "input_schema": PARAMETERS}
        async with served(script) as (session, address, _), anthropic_client(session, address) as client:
            asked: Any = {"model": "any", "max_tokens": 99, "system": "Be short.", "tools": [tool]}
            async with client.messages.stream(messages=ASKED, **asked) as stream:
                first = await stream.get_final_message()
            calls = [block for block in first.content if block.type == "tool_use"]
            assert [call.input for call in calls] == [{"a": 3}, {"a": 4}]
            assert first.stop_reason == "tool_use"
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "6"} for call in calls]
            said = [block.model_dump() for block in first.content]
            conversation = [*ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": results}]
            second = await client.messages.create(messages=conversation, **asked)
            assert second.content[0].text == "14"
            assert [message["role"] for message in script.asked[1].messages] == ["system", "user", "assistant", "tool", "tool"]
            assert script.known[1]
            assert script.asked[1].max_tokens == 99

    asyncio.run(run())


def test_a_retry_of_a_client_after_a_failure_of_the_server_counts_once() -> None:
    async def run() -> None:
        script = Script(RolloutFailed("lost", kind="ServerError", is_infrastructure=True), "42")
        async with served(script) as (session, address, _), openai_client(session, address, max_retries=2) as client:
            answer = await client.chat.completions.create(model="any", messages=ASKED)
            assert answer.choices[0].message.content == "42"
            assert len(session.delivered()) == 1
            assert session.failure is not None

    asyncio.run(run())


def test_a_request_whose_client_went_away_is_answered_once_and_only_trained_on_when_it_was_received() -> None:
    async def run() -> None:
        waiting = asyncio.Event()
        script = Script("42", wait=waiting)
        async with served(script) as (session, address, _), openai_client(session, address, max_retries=0) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.3).chat.completions.create(model="any", messages=ASKED)
            (asked,) = session._calls
            await asyncio.to_thread(wait_until, lambda: asked.is_abandoned, timeout_s=10, waiting_for="the server to notice")
            waiting.set()
            await asked.answer
            assert session.delivered() == []
            again = await client.chat.completions.create(model="any", messages=ASKED)
            assert (again.choices[0].message.content, len(script.asked), len(session.delivered())) == ("42", 1, 1)

    asyncio.run(run())


def test_an_answer_whose_stream_was_broken_off_is_not_trained_on() -> None:
    async def run() -> None:
        script = Script("42 " * 2_000_000)
        async with served(script) as (session, address, _), httpx.AsyncClient() as http:
            body = {"messages": ASKED, "stream": True}
            headers = {"Authorization": f"Bearer {session.key}"}
            async with http.stream("POST", f"{address}/v1/chat/completions", json=body, headers=headers) as stream:
                await anext(stream.aiter_raw(600))
            (asked,) = session._calls
            await asyncio.to_thread(wait_until, lambda: asked.is_abandoned, timeout_s=10, waiting_for="the server to notice")
            assert session.delivered() == []

    asyncio.run(run())


def test_the_same_request_sent_twice_on_purpose_is_sampled_twice() -> None:
    async def run() -> None:
        waiting = asyncio.Event()
        script = Script("4", "2", wait=waiting)
        async with served(script) as (session, address, _), openai_client(session, address) as client:
            asking = [asyncio.create_task(client.chat.completions.create(model="any", messages=ASKED)) for _ in range(2)]
            await asyncio.to_thread(wait_until, lambda: len(script.asked) == 2, timeout_s=10, waiting_for="two requests")
            waiting.set()
            said = {answer.choices[0].message.content for answer in await asyncio.gather(*asking)}
            assert said == {"4", "2"}
            assert len(session.delivered()) == 2

    asyncio.run(run())


def test_limits_end_the_conversation_and_keep_what_was_answered() -> None:
    async def run() -> None:
        script = Script("a", "b")
        async with served(script, SessionLimits(max_turns=1)) as (session, address, _):
            async with anthropic_client(session, address, max_retries=0) as client:
                asked: Any = {"model": "any", "max_tokens": 9, "messages": ASKED}
                await client.messages.create(**asked)
                with pytest.raises(anthropic.BadRequestError, match=r"max_turns \(1\) is reached"):
                    await client.messages.create(**asked)
            assert session.is_cut
            assert len(session.delivered()) == 1

    asyncio.run(run())


def test_a_failed_request_leaves_the_limits_as_they_were_and_answers_under_way_count() -> None:
    async def run() -> None:
        script = Script(RolloutFailed("lost", kind="ServerError", is_infrastructure=True), "42")
        async with served(script, SessionLimits(max_turns=1)) as (session, address, _):
            async with openai_client(session, address, max_retries=2) as client:
                await client.chat.completions.create(model="any", messages=ASKED)
            assert not session.is_cut
        waiting = asyncio.Event()
        script = Script(*"abcdefgh", wait=waiting)
        async with served(script, SessionLimits(max_tokens=10)) as (session, address, _):
            async with openai_client(session, address, max_retries=0) as client:
                asking = [
                    asyncio.create_task(client.chat.completions.create(model="any", messages=ASKED, max_tokens=4))
                    for _ in range(8)
                ]
                await asyncio.to_thread(wait_until, lambda: len(script.asked) == 3, timeout_s=10, waiting_for="three requests")
                waiting.set()
                answers = await asyncio.gather(*asking, return_exceptions=True)
            assert sorted(request.max_tokens or 0 for request in script.asked) == [2, 4, 4]
            assert sum(isinstance(answer, openai.BadRequestError) for answer in answers) == 5

    asyncio.run(run())


def test_a_session_takes_its_reward_and_refuses_strangers_and_what_cannot_be_trained_on() -> None:
    async def run() -> None:
        async with served(Script("x")) as (session, address, server), httpx.AsyncClient() as http:
            own = {"Authorization": f"Bearer {session.key}"}
            assert (await http.post(f"{address}/reward", json={"reward": 0.5, "scores": {"length": 3}}, headers=own)).is_success
            assert (session.reward, session.scores) == (0.5, {"length": 3.0})
            for wrong in (
                b'{"reward": "much"}',
                b"1" * 400,
                b'{"reward": 1, "scores": [1]}',
                b'{"scores": {"\\ud800": 1}}',
                b"[" * 9999,
            ):
                assert (await http.post(f"{address}/reward", content=wrong, headers=own)).status_code == 400
            await http.post(f"{address}/reward", json={"reward": 1, "scores": {"reward": 9}}, headers=own)
            assert (session.reward, session.scores) == (1.0, {"reward": 9.0})
            for url in (f"{address}/reward", f"{address}/v1/chat/completions", f"{address}/v1/messages"):
                assert (await http.post(url, json={}, headers={"x-api-key": "guess"})).status_code == 401
            async with server.serving(AgentSession(Script(), SessionLimits())) as other:
                assert (await http.post(f"{other}/reward", json=1.0, headers=own)).status_code == 401
            gone = (await http.get(f"{other}/v1/models", headers=own)).json()
            assert gone["error"]["message"] == "no open session has this address and key"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("chat/completions", {"messages": ASKED, "n": 2}, "n must be 1"),
        ("chat/completions", {"messages": ASKED, "response_format": {"type": "json_object"}}, "'json_object' constrains"),
        ("chat/completions", {"messages": ASKED, "tools": [CHAT_TOOL], "tool_choice": "required"}, "'required' forces a call"),
        ("chat/completions", {"messages": ASKED, "max_tokens": "5"}, "the limit of tokens must be a number"),
        ("chat/completions", [], "AttributeError"),
        ("chat/completions", {}, "KeyError: 'messages'"),
        ("responses", {"input": "Go", "tools": [{"type": "web_search"}]}, "type 'web_search' cannot be offered"),
        ("responses", {"input": [{"type": "additional_tools"}]}, "item of type 'additional_tools'"),
        ("messages", {"messages": ASKED, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "type 'bash_20250124' cannot"),
        ("messages", {"messages": ASKED, "output_config": {"format": {"type": "json_schema"}}}, "'json_schema' constrains"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type 'image' is no text"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_the_reason(path: str, body: Any, reason: str) -> None:
    async def run() -> None:
        async with served(Script()) as (session, address, _), httpx.AsyncClient() as http:
            answer = await http.post(f"{address}/v1/{path}", json=body, headers={"x-api-key": session.key})
            assert answer.status_code == 400
            assert reason in answer.json()["error"]["message"]

    asyncio.run(run())


def test_a_session_that_has_ended_asks_nothing_and_takes_no_reward() -> None:
    async def run() -> None:
        async with served(Script("x")) as (session, _, _):
            pass
        with pytest.raises(RolloutFailed, match="the session has ended"):
            await session.ask(ModelRequest(messages=ASKED), is_retry=False)
        with pytest.raises(RolloutFailed, match="the session has ended"):
            session.report(1.0, {})

    asyncio.run(run())


def test_a_request_that_waits_when_its_session_ends_is_told_so() -> None:
    async def run() -> None:
        script = Script("x", wait=asyncio.Event())
        async with served(script) as (session, address, _), openai_client(session, address, max_retries=0) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="any", messages=ASKED))
            await asyncio.to_thread(wait_until, lambda: len(script.asked) == 1, timeout_s=10, waiting_for="the request")
            await session.aclose()
            with pytest.raises(openai.BadRequestError, match="the session has ended"):
                await asking

    asyncio.run(run())
