import pytest

from trivet.conversations.records import read_conversation
from trivet.errors import ConfigError

USER, ANSWER = {"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, ANSWER]},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": "abc", "completion": "cba"},
        {"messages": None, "prompt": "abc", "completion": [ANSWER], "id": 7},
    ],
)
def test_all_forms_of_a_record_mean_the_same(record) -> None:
    assert read_conversation(record).messages == [USER, ANSWER]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "abc", "id": 1}, "record 3 has the columns id, text; it needs `messages`, or `prompt` and `completion`"),
        ({"prompt": "abc", "completion": None}, "has the columns completion, prompt, one of them empty"),
        ({"messages": 7}, "`messages` of record 3 must be a list of messages or text, got 7"),
        ({"messages": [{"from": "human", "value": "x"}]}, "must have `role` and `content`, got .'from', 'value'."),
        ({"messages": [{"role": "human", "content": "x"}]}, "must be one of system, developer, user, .* got 'human'"),
        ({"messages": [USER | {"weight": 0.5}]}, "the weight of message 0 in `messages` of record 3 must be 0 or 1, got 0.5"),
        (
            {"messages": [USER, ANSWER | {"content": 42}]},
            "content of message 1 in `messages` of record 3 must be text .* got 42",
        ),
        ({"prompt": [USER], "completion": [ANSWER | {"content": True}]}, "content of message 0 in `completion` of .* got True"),
        ({"messages": [USER | {"content": {"text": "x"}}]}, "must be text or a list of parts, got .'text': 'x'."),
        ({"messages": [USER | {"content": [1]}]}, r"must be text or a list of parts, got \[1\]"),
        ({"messages": [USER, ANSWER | {"tool_calls": 7}]}, "the tool_calls of message 1 .* must be a list of calls, got 7"),
        ({"messages": [USER], "tools": "{"}, "`tools` of record 3 is text and not JSON"),
        ({"messages": [USER], "tools": {"a": 1}}, "`tools` of record 3 must be a list of definitions"),
    ],
)
def test_what_is_no_conversation_is_named(record, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_conversation(record, place="record 3")


@pytest.mark.parametrize(("tools", "expected"), [('[{"name": "x"}]', [{"name": "x"}]), ("", None), ([], None), (None, None)])
def test_tools_are_a_list_or_its_json(tools, expected) -> None:
    assert read_conversation({"messages": [USER], "tools": tools}).tools == expected


def test_calls_reach_the_template_as_from_a_server() -> None:
    calls = [{"function": {"name": "f", "arguments": '{"a": 1}'}}, {"name": "g", "arguments": "no json"}]
    (message,) = read_conversation({"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}).messages
    assert message["content"] == ""
    assert [call.get("function", call)["arguments"] for call in message["tool_calls"]] == [{"a": 1}, "no json"]
