"""The server of scripted policies, asked by the real OpenAI client."""

import asyncio

import pytest
from openai import AsyncOpenAI, BadRequestError

from trivet.evaluation.scripted_policies import PolicyKind, Script
from trivet.evaluation.scripted_server import serve_scripts

ASKED = [{"role": "user", "content": "What is 6 times 7?"}]
TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"properties": {"a": {"type": "integer"}}}}}


def test_the_openai_client_reads_replies_and_calls_whole_and_as_a_stream() -> None:
    async def ask() -> None:
        async with serve_scripts() as server, AsyncOpenAI(api_key="none") as client:
            server.scripts = {3: Script(answer="42")}
            gold, wild = (
                client.with_options(base_url=server.base_url(policy, 3)) for policy in (PolicyKind.GOLD, PolicyKind.RANDOM)
            )
            whole = await gold.chat.completions.create(model="m", messages=ASKED)
            assert whole.choices[0].message.content == "42"
            for seed in range(20):
                async with wild.chat.completions.stream(model="m", messages=ASKED, tools=[TOOL], seed=seed) as stream:
                    streamed = (await stream.get_final_completion()).choices[0].message
                again = await wild.chat.completions.create(model="m", messages=ASKED, tools=[TOOL], seed=seed)
                assert streamed.content == again.choices[0].message.content
                calls = [message.tool_calls or [] for message in (streamed, again.choices[0].message)]
                assert [call.function.arguments for call in calls[0]] == [call.function.arguments for call in calls[1]]

    asyncio.run(ask())


def test_a_conversation_without_end_is_refused_as_a_server_refuses_one_that_is_too_long() -> None:
    endless = [*ASKED, *[{"role": "assistant", "content": "?"}, {"role": "user", "content": "again"}] * 32]

    async def ask() -> None:
        async with (
            serve_scripts() as server,
            AsyncOpenAI(base_url=server.base_url(PolicyKind.NULL, 0), api_key="none") as client,
        ):
            server.scripts = {0: Script()}
            with pytest.raises(BadRequestError, match="maximum context length"):
                await client.chat.completions.create(model="m", messages=endless)

    asyncio.run(ask())
