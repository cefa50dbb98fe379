"""The server of scripted policies, asked by the real OpenAI client."""

from openai import OpenAI

from trivet.evaluation.scripted_policies import PolicyKind, Script
from trivet.evaluation.scripted_server import serve_scripts

ASKED = [{"role": "user", "content": "What is 6 times 7?"}]
TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"properties": {"a": {"type": "integer"}}}}}


def test_the_openai_client_reads_replies_and_calls_whole_and_as_a_stream() -> None:
    with (
        serve_scripts() as server,
        OpenAI(base_url=server.base_url(PolicyKind.GOLD, 3), api_key="none") as gold,
        OpenAI(base_url=server.base_url(PolicyKind.RANDOM, 3), api_key="none") as wild,
    ):
        server.scripts = {3: Script(answer="42")}
        whole = gold.chat.completions.create(model="m", messages=ASKED)
        assert whole.choices[0].message.content == "42"
        with gold.chat.completions.stream(model="m", messages=ASKED) as stream:
            assert stream.get_final_completion().choices[0].message.content == "42"
        for seed in range(20):
            with wild.chat.completions.stream(model="m", messages=ASKED, tools=[TOOL], seed=seed) as stream:
                streamed = stream.get_final_completion().choices[0].message
            again = wild.chat.completions.create(model="m", messages=ASKED, tools=[TOOL], seed=seed).choices[0].message
            assert streamed.content == again.content
            assert [call.function.arguments for call in streamed.tool_calls or []] == [
                call.function.arguments for call in again.tool_calls or []
            ]


def test_a_conversation_without_end_is_refused_as_a_server_refuses_one_that_is_too_long() -> None:
    endless = [*ASKED, *[{"role": "assistant", "content": "?"}, {"role": "user", "content": "again"}] * 32]
    with serve_scripts() as server:
        server.scripts = {0: Script()}
        path, body = "/null/0/v1/chat/completions", b'{"messages": %s}' % str(endless).replace("'", '"').encode()
        status, answer = server.answer(path, body)
        assert (status, "maximum context length" in answer["error"]["message"]) == (400, True)
        assert server.answer("/null/9/v1/chat/completions", body)[0] == 404
