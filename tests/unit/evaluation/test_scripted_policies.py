"""The replies of policies that need no model."""

import json

import pytest

from trivet.evaluation.scripted_policies import PolicyKind, Script, find_forms, write_reply

SCRIPT = Script(answer="42", commonest="7", form="<answer>{}</answer>")
ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 6 times 7?"}]


@pytest.mark.parametrize(
    ("policy", "content"),
    [
        (PolicyKind.NULL, ""),
        (PolicyKind.CONSTANT, "<answer>7</answer>"),
        (PolicyKind.GOLD, "<answer>42</answer>"),
    ],
)
def test_a_policy_says_what_it_stands_for_in_the_form_of_an_answer(policy: PolicyKind, content: str) -> None:
    assert write_reply(policy, SCRIPT, messages=ASKED, tools=[], seed=1)["content"] == content


def test_the_random_policy_draws_words_of_the_prompt_by_its_seed_and_calls_tools_by_their_schema() -> None:
    said = {write_reply(PolicyKind.RANDOM, SCRIPT, messages=ASKED, tools=[], seed=seed)["content"] for seed in range(20)}
    assert len(said) > 10
    assert said == {
        write_reply(PolicyKind.RANDOM, SCRIPT, messages=ASKED, tools=[], seed=seed)["content"] for seed in range(20)
    }
    parameters = {"type": "object", "properties": {"count": {"type": "integer"}, "unit": {"enum": ["m", "km"]}}}
    tool = {"type": "function", "function": {"name": "measure", "parameters": parameters}}
    replies = [write_reply(PolicyKind.RANDOM, SCRIPT, messages=ASKED, tools=[tool], seed=seed) for seed in range(20)]
    calls = [reply["tool_calls"][0]["function"] for reply in replies if "tool_calls" in reply]
    assert 0 < len(calls) < 20
    for call in calls:
        arguments = json.loads(call["arguments"])
        assert call["name"] == "measure"
        assert isinstance(arguments["count"], int)
        assert arguments["unit"] in ("m", "km")


def test_the_tags_of_the_prompt_are_tried_before_the_usual_forms() -> None:
    forms = find_forms([{"role": "system", "content": "Put the word into <guess> tags."}])
    assert forms[0].format("crane") == "<guess>crane</guess>"
    assert "\\boxed{crane}" in [form.format("crane") for form in forms]
