"""Conversations: what is read, what is trained on, and in which order."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from trivet.errors import ConfigError
from trivet.trainer.sft_data import load_data, read_messages, step_indices, to_sample

USER, ANSWER = {"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}


@pytest.fixture
def tokenizer(tiny_model: Path):
    return AutoTokenizer.from_pretrained(tiny_model)


def trained_text(sample, tokenizer) -> str:
    return tokenizer.decode(sample.token_ids_T[sample.loss_mask_T])


def test_loss_falls_on_the_answer_and_its_end_of_turn(tokenizer) -> None:
    sample = to_sample([USER, ANSWER], tokenizer)
    assert trained_text(sample, tokenizer) == "cba<|im_end|>"
    assert tokenizer.decode(sample.token_ids_T) == tokenizer.apply_chat_template([USER, ANSWER], tokenize=False)


def test_every_assistant_turn_is_trained_on_and_nothing_else(tokenizer) -> None:
    system = {"role": "system", "content": "reverse"}
    sample = to_sample([system, USER, ANSWER, USER, {"role": "assistant", "content": "xyz"}], tokenizer)
    assert trained_text(sample, tokenizer) == "cba<|im_end|>xyz<|im_end|>"


def test_what_follows_the_last_answer_is_left_out(tokenizer) -> None:
    assert to_sample([USER, ANSWER, USER], tokenizer).num_tokens == to_sample([USER, ANSWER], tokenizer).num_tokens


def test_the_prompt_is_tokenized_as_the_server_would(tokenizer) -> None:
    sample = to_sample([USER, ANSWER], tokenizer)
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
    sample = to_sample([USER, call, {"role": "tool", "content": "found"}, ANSWER], tokenizer, tools=[{"name": "search"}])
    assert trained_text(sample, tokenizer) == '{"name": "search"}<|im_end|>cba<|im_end|>'
    assert tokenizer.decode(sample.token_ids_T).startswith('[{"name": "search"}]<|im_start|>user:abc')


def test_a_template_that_rewrites_history_is_refused(tokenizer) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}{% if loop.last %}!{% endif %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        to_sample([USER, ANSWER, USER, ANSWER], tokenizer)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": "abc", "completion": "cba"},
        {"messages": None, "prompt": "abc", "completion": [ANSWER]},
    ],
)
def test_all_forms_of_a_row_mean_the_same(row) -> None:
    assert read_messages(row) == [USER, ANSWER]


def test_a_row_without_a_conversation_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"\['text'\]; it needs `messages`, or `prompt` and `completion`"):
        read_messages({"text": "abc"})


def test_jsonl_and_saved_datasets_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "completion": "ba"}, {"prompt": "xy", "completion": "yx"}]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    Dataset.from_list(rows).save_to_disk(tmp_path / "plain")
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(tmp_path / "split")
    for name in ("data.jsonl", "plain", "split"):
        loaded = load_data(str(tmp_path / name))
        assert [loaded[index] for index in range(len(loaded))] == rows


@pytest.mark.parametrize(
    ("content", "message"), [(None, "is neither"), ("", "holds no rows"), ('{"a": 1}\n{broken', r"line 2, is not JSON")]
)
def test_bad_data_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_data(str(path))


@given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 6))
def test_every_epoch_takes_each_row_once(batch_size: int, num_rows: int, epochs: int) -> None:
    num_steps = -(-num_rows * epochs // batch_size)
    drawn = [
        index
        for step in range(1, num_steps + 1)
        for index in step_indices(step, batch_size=batch_size, num_rows=num_rows, seed=3, does_shuffle=True)
    ]
    for epoch in range(epochs):
        assert sorted(drawn[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_epochs_have_orders_of_their_own_and_no_shuffle_keeps_the_files() -> None:
    orders = [step_indices(step, batch_size=50, num_rows=50, seed=0, does_shuffle=True) for step in (1, 2)]
    assert orders[0] != orders[1]
    assert step_indices(2, batch_size=3, num_rows=5, seed=0, does_shuffle=False) == [3, 4, 0]
