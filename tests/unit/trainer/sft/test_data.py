from pathlib import Path

import pytest
from transformers import AutoTokenizer

from support.template_server import make_tokenizer
from trivet.config.schema.sft import LossMaskConfig
from trivet.conversations.records import ChatMessage, Conversation, read_conversation
from trivet.errors import ConfigError
from trivet.trainer.sft.data import to_sample

SYSTEM, USER, ANSWER = (
    {"role": "system", "content": "reverse"},
    {"role": "user", "content": "abc"},
    {"role": "assistant", "content": "cba"},
)
ALL = LossMaskConfig(system=True, user=True, tool=True)
ENDS = {"chatml": "<|im_end|>", "hermes": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}
"""The end of a turn, for each template that only appends."""


def talk(*messages: ChatMessage, tools=None) -> Conversation:
    return read_conversation({"messages": list(messages), "tools": tools})


@pytest.fixture
def tokenizer(tiny_model: Path):
    return AutoTokenizer.from_pretrained(tiny_model)


def trained_text(sample, tokenizer) -> str:
    return tokenizer.decode(sample.token_ids_T[sample.loss_mask_T])


def test_loss_falls_on_the_answer_and_its_end_of_turn(tokenizer) -> None:
    sample = to_sample(talk(USER, ANSWER), tokenizer)
    assert trained_text(sample, tokenizer) == "cba<|im_end|>"
    assert tokenizer.decode(sample.token_ids_T) == tokenizer.apply_chat_template([USER, ANSWER], tokenize=False)


def test_every_assistant_turn_is_trained_on_and_nothing_else(tokenizer) -> None:
    sample = to_sample(talk(SYSTEM, USER, ANSWER, USER, {"role": "assistant", "content": "xyz"}), tokenizer)
    assert trained_text(sample, tokenizer) == "cba<|im_end|>xyz<|im_end|>"


def test_what_follows_the_last_answer_is_left_out(tokenizer) -> None:
    assert to_sample(talk(USER, ANSWER, USER), tokenizer).num_tokens == to_sample(talk(USER, ANSWER), tokenizer).num_tokens


def test_the_prompt_is_tokenized_as_the_server_would(tokenizer) -> None:
    sample = to_sample(talk(USER, ANSWER), tokenizer)
    prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert sample.token_ids_T[: len(prompt)].tolist() == prompt
    assert not sample.loss_mask_T[: len(prompt)].any()


def test_tools_are_offered_by_the_template_and_only_the_calls_are_trained_on(tokenizer) -> None:
    tokenizer.chat_template = (
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m['role'] }}:{{ m['content'] }}"
        "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "search"}]}
    sample = to_sample(talk(USER, call, {"role": "tool", "content": "found"}, ANSWER, tools=[{"name": "search"}]), tokenizer)
    assert trained_text(sample, tokenizer) == '{"name": "search"}<|im_end|>cba<|im_end|>'
    assert tokenizer.decode(sample.token_ids_T).startswith('[{"name": "search"}]<|im_start|>user:abc')


def test_a_template_that_rewrites_history_is_refused(tokenizer) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}{% if loop.last %}!{% endif %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        to_sample(talk(USER, ANSWER, USER, ANSWER), tokenizer)


def with_end_of_turn(template: str):
    tokenizer = make_tokenizer(template)
    tokenizer.eos_token = ENDS[template]
    return tokenizer


def whole_text(conversation: Conversation, tokenizer) -> str:
    return tokenizer.apply_chat_template(conversation.messages, tools=conversation.tools, tokenize=False)


@pytest.mark.parametrize("template", ENDS)
def test_tokens_are_those_of_the_whole_conversation(template: str) -> None:
    tokenizer, conversation = with_end_of_turn(template), talk(SYSTEM, USER, ANSWER)
    for mask in (LossMaskConfig(), ALL, LossMaskConfig(user=True), LossMaskConfig(assistant=False, system=True, user=True)):
        sample = to_sample(conversation, tokenizer, loss_mask=mask)
        assert tokenizer.decode(sample.token_ids_T) == whole_text(conversation, tokenizer)
        assert sample.token_ids_T.tolist() == to_sample(conversation, tokenizer).token_ids_T.tolist()


@pytest.mark.parametrize("template", ENDS)
def test_each_role_is_masked_by_its_own_key(template: str) -> None:
    tokenizer, end = with_end_of_turn(template), ENDS[template]
    conversation = talk(SYSTEM, USER, ANSWER)
    texts = {
        role: trained_text(
            to_sample(conversation, tokenizer, loss_mask=LossMaskConfig(**{"assistant": False, role: True})), tokenizer
        )
        for role in ("system", "user", "assistant")
    }
    assert texts["system"].endswith(f"reverse{end}")
    assert "abc" not in texts["system"]
    assert texts["user"].endswith(f"abc{end}")
    assert "reverse" not in texts["user"]
    assert texts["assistant"].endswith(f"cba{end}")
    assert "abc" not in texts["assistant"]


@pytest.mark.parametrize("template", ["chatml", "hermes", "llama3"])
def test_turns_of_a_long_conversation_are_masked_one_by_one(template: str) -> None:
    tokenizer, end = with_end_of_turn(template), ENDS[template]
    second = {"role": "assistant", "content": "zyx"}
    conversation = talk(SYSTEM, USER, ANSWER, {"role": "user", "content": "xyz"}, second)
    assert trained_text(to_sample(conversation, tokenizer), tokenizer).replace("\n", "") == f"cba{end}zyx{end}"
    users = to_sample(conversation, tokenizer, loss_mask=LossMaskConfig(user=True, assistant=False))
    assert trained_text(users, tokenizer).count(end) == 2
    assert "zyx" not in trained_text(users, tokenizer)


@pytest.mark.parametrize("template", ["hermes", "qwen3"])
def test_what_several_tools_answer_is_trained_on_together(template: str) -> None:
    tokenizer, end = with_end_of_turn(template), ENDS[template]
    calls = [{"type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}] * 2
    conversation = talk(
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n", "tool_calls": calls},
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": "second"},
        ANSWER,
        tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}],
    )
    answers = trained_text(to_sample(conversation, tokenizer, loss_mask=LossMaskConfig(assistant=False, tool=True)), tokenizer)
    assert answers.index("first") < answers.index("second")
    assert answers.endswith(end)
    assert "look" not in answers
    assert "cba" not in answers
    calls_and_answer = trained_text(to_sample(conversation, tokenizer), tokenizer)
    assert '{"at": "x"}' in calls_and_answer  # an object, as a server hands it to the template
    assert "first" not in calls_and_answer


def test_the_header_of_an_answer_is_given_and_that_of_a_user_is_trained_on(tokenizer) -> None:
    sample = to_sample(talk(SYSTEM, USER, ANSWER), tokenizer, loss_mask=LossMaskConfig(user=True))
    assert trained_text(sample, tokenizer) == "<|im_start|>user\nabc<|im_end|>cba<|im_end|>"


def test_a_weight_decides_for_its_message_alone(tokenizer) -> None:
    second = {"role": "assistant", "content": "xyz"}
    sample = to_sample(talk(USER, ANSWER | {"weight": 0}, USER | {"weight": 1}, second), tokenizer)
    assert trained_text(sample, tokenizer) == "<|im_start|>user\nabc<|im_end|>xyz<|im_end|>"


def test_a_last_message_is_kept_where_it_is_trained_on(tokenizer) -> None:
    sample = to_sample(talk(USER, ANSWER, USER), tokenizer, loss_mask=LossMaskConfig(user=True, assistant=False))
    assert trained_text(sample, tokenizer).count("abc<|im_end|>") == 2


def test_thinking_that_a_template_drops_from_past_turns_is_refused() -> None:
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\ncba"}
    tokenizer = with_end_of_turn("qwen3")
    assert "hm" in trained_text(to_sample(talk(USER, thought), tokenizer), tokenizer)
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        to_sample(talk(USER, thought, USER, ANSWER), tokenizer)


def test_a_template_that_wants_a_user_first_is_named_with_what_it_was_given(tokenizer) -> None:
    tokenizer.chat_template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user comes first') }}{% endif %}"
    with pytest.raises(ConfigError, match=r"first 2 of a conversation's 3 messages \(system, user\): a user comes first"):
        to_sample(talk(SYSTEM, USER, ANSWER), tokenizer)


def test_a_token_that_lies_across_a_boundary_goes_with_its_beginning() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    words = [{"role": "user", "content": "mess"}, {"role": "system", "content": "age.role"}, ANSWER]
    sample = to_sample(talk(*words), tokenizer, loss_mask=LossMaskConfig(user=True, assistant=False))
    tokens = tokenizer.batch_decode(sample.token_ids_T[:, None])
    assert "".join(tokens) == "message.rolecba"
    assert "message" in tokens[0] + tokens[1]
    is_begun_by_user = [len("".join(tokens[:number])) < len("mess") for number in range(len(tokens))]
    assert sample.loss_mask_T.tolist() == [False, *is_begun_by_user[1:]]
