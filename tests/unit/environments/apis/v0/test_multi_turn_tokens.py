"""Training uses exactly the tokens that the server read and sampled, whatever the chat template does."""

import asyncio
from typing import Any

import numpy as np
import pytest
import verifiers as vf
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from support.groups import make_draw
from support.multi_turn import QUESTION, Interview, add
from support.served_turns import assert_trains_on_what_was_sampled
from support.template_conversations import CONVERSATIONS, TemplateConversation
from support.template_server import SENTENCE_END, TemplateServer
from support.v0_host import ToyHost
from trivet.algorithms.packing import PackItem, stack
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.apis.v0.play import ModelClient
from trivet.errors import RolloutFailed
from trivet.orchestrator.advantage import make_advantage
from trivet.orchestrator.dispatcher import make_group
from trivet.wire.rollouts import Rollout

STRATEGIES = ["interleaved", "branching"]


def run(
    case: TemplateConversation,
    *,
    strategy: str,
    seed: int = 0,
    keeps_tokens: bool = True,
    kind: type[Interview] = Interview,
    **server_arguments: Any,
) -> tuple[Rollout, TemplateServer]:
    server = TemplateServer(
        case.template, answers=case.answers, seed=seed, parses_reasoning=case.parses_reasoning, **server_arguments
    )
    arguments = {"dataset": Dataset.from_list([{"prompt": [QUESTION], "answer": ""}]), "rubric": vf.Rubric()}
    env = vf.ToolEnv(tools=[add], **arguments) if case.has_tool else kind(case.lines, **arguments)
    host = ToyHost(env=env, settings={"trajectory_strategy": strategy})

    async def scenario() -> Rollout:
        openai = AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=server.http(), max_retries=0)
        client = ModelClient(openai, keeps_tokens=keeps_tokens and strategy == "interleaved")
        [rollout] = await host.play(client, num_rollouts=1)
        return rollout

    return asyncio.run(scenario()), server


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_training_tokens_are_those_read_and_sampled(name: str, strategy: str):
    case = CONVERSATIONS[name]
    rollout, server = run(case, strategy=strategy)
    assert len(server.turns) == rollout.num_turns == len(case.answers)
    assert_trains_on_what_was_sampled(rollout, server.turns, tokenizer=server.tokenizer)
    assert len(rollout.samples) == (case.num_samples if strategy == "interleaved" else len(case.answers))
    assert rollout.scores.get("broken_prefixes", 0) == (case.num_samples - 1 if strategy == "interleaved" else 0)


@pytest.mark.parametrize("name", [name for name, case in CONVERSATIONS.items() if case.num_samples == 1])
def test_text_alone_would_become_other_tokens(name: str):
    """This shows that the cases can fail: without the tokens of earlier turns the same conversations break apart."""
    rollout, server = run(CONVERSATIONS[name], strategy="interleaved", keeps_tokens=False)
    assert_trains_on_what_was_sampled(rollout, server.turns, tokenizer=server.tokenizer)
    assert len(rollout.samples) > 1


PIECES = ["a", "two and three", " ", "\n", "\n\n", "é", "日本", "🙂", "{", "<think>", "</think>", "</think>\n\n", "<|im"]
texts = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
STOP_OF = {
    "chatml": "<|im_end|>",
    "hermes": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "deepseek_r1": SENTENCE_END,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=40, deadline=None)
@given(
    template=st.sampled_from(sorted(STOP_OF)),
    turns=st.lists(st.tuples(texts, st.booleans(), texts), min_size=2, max_size=4),
    seed=st.integers(0, 1000),
    parses_reasoning=st.booleans(),
)
def test_any_conversation_trains_on_what_was_read_and_sampled(strategy, template, turns, seed, parses_reasoning):
    answers = [answer + (STOP_OF[template] if is_complete else "") for answer, is_complete, _ in turns]
    lines = tuple(line for _, _, line in turns[:-1])
    case = TemplateConversation(template, answers, 0, lines, parses_reasoning)
    rollout, server = run(case, strategy=strategy, seed=seed)
    assert_trains_on_what_was_sampled(rollout, server.turns, tokenizer=server.tokenizer)
    num_turns = sum(bool(turn.sampled) for turn in server.turns)
    if strategy == "branching":
        assert len(rollout.samples) == num_turns
    elif template in ("chatml", "llama3") and not parses_reasoning:
        assert len(rollout.samples) == bool(num_turns)


@pytest.mark.parametrize("room", [0, 1])
def test_a_conversation_that_outgrows_the_context_ends_as_truncated_and_keeps_its_turns(room: int):
    case = CONVERSATIONS["plain chat"]
    _, whole = run(case, strategy="interleaved")
    rollout, server = run(case, strategy="interleaved", max_model_len=len(whole.turns[2].read) - room)
    assert len(server.turns) == rollout.num_turns == 2
    assert rollout.ran_out_of_context
    assert rollout.is_truncated
    assert_trains_on_what_was_sampled(rollout, server.turns, tokenizer=server.tokenizer)


class Forgetful(Interview):
    """An environment that keeps only the last answer of a conversation."""

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return [QUESTION, *messages[-2:]] if len(messages) > 3 else messages


def test_a_conversation_that_the_environment_rewrites_goes_on_as_a_new_sample():
    case = TemplateConversation("chatml", ["Five<|im_end|>", "Yes<|im_end|>", "Bye<|im_end|>"], 2, ("Sure?", "Really?"))
    rollout, server = run(case, strategy="interleaved", kind=Forgetful)
    assert_trains_on_what_was_sampled(rollout, server.turns, tokenizer=server.tokenizer)
    assert len(rollout.samples) == 2


class Graded(Interview):
    """An environment that gives a reward for each answer."""

    rewards: Any = (1.0, 0.0, 0.25)

    async def get_prompt_messages(self, state):
        state["turn_rewards"] = list(self.rewards)
        return await super().get_prompt_messages(state)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_rewards_of_turns_reach_the_advantages_of_their_tokens_in_the_batch(strategy: str):
    case = TemplateConversation("chatml", ["Five<|im_end|>", "Yes<|im_end|>", "Bye now<|im_end|>"], 1, ("Sure?", "Really?"))
    first, _ = run(case, strategy=strategy, kind=Graded)
    second, server = run(case, strategy=strategy, kind=Graded)
    assert first.turn_rewards == [1.0, 0.0, 0.25]
    second.index, second.reward, second.turn_rewards = 1, 0.5, [0.0, 0.0, 1.0]
    config = OrchestratorConfig.model_validate({"advantage": {"type": "turns"}, "rollouts_per_example": 2, "batch_size": 2})
    group = make_group(make_draw(0), [first, second], config=config, advantage=make_advantage(config.advantage))
    items = [PackItem(sample=sample, advantage=rollout.advantage) for rollout in group.rollouts for sample in rollout.samples]
    [row] = stack(items, seq_len=2048, samples_per_row=len(items))
    # rewards from each turn on: 1.25, 0.25, 0.25 and 1.5, 1.5, 1.5 with the final reward; half of the difference is the advantage
    by_turn = [-0.125, -0.625, -0.625]
    lengths = [len(turn.sampled) for turn in server.turns]
    expected = np.repeat([*by_turn, *(-value for value in by_turn)], [*lengths, *lengths])
    assert sorted(row.advantages_T[row.loss_mask_T]) == sorted(expected.astype(np.float32))
    for rollout, sign in zip(group.rollouts, (1, -1), strict=True):
        columns = [(sample.advantages_T, sample.loss_mask_T) for sample in rollout.samples]
        values = np.concatenate([values_T[mask_T] for values_T, mask_T in columns if values_T is not None])
        np.testing.assert_array_equal(values, sign * np.repeat(by_turn, lengths))
    assert not row.advantages_T[~row.loss_mask_T].any()


@pytest.mark.parametrize(
    ("rewards", "said"),
    [([1.0], "must be a list of 2 numbers, one per turn, got 1"), ([1.0, float("nan")], "reward of environment 'toy' is")],
)
def test_rewards_that_do_not_fit_the_turns_fail_their_group(rewards: list[float], said: str):
    case = TemplateConversation("chatml", ["Five<|im_end|>", "Yes<|im_end|>"], 1, ("Sure?",))
    with pytest.raises(RolloutFailed, match=said):
        run(case, strategy="interleaved", kind=type("Faulty", (Graded,), {"rewards": rewards}))
