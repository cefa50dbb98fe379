"""Every kind of verifiers environment runs unchanged: tools, stateful tools, several turns, groups of environments, judges."""

import json

import httpx
import pytest
import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI

from support.scripted_model import ScriptedModel, call_of
from support.v0_host import ToyHost

ROWS = [{"question": "2+3", "answer": "5"}, {"question": "4+5", "answer": "9"}]


def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return str(a + b)


def is_right(completion, answer, **kwargs) -> float:
    return float(completion[-1]["content"] == answer)


def run(env: vf.Environment, answer, *, num_rollouts: int = 2, example_id: int = 0):
    """Run a group of `env`. The model answers with `answer`."""

    return ToyHost(env=env).run(ScriptedModel(answer), num_rollouts=num_rollouts, example_id=example_id)


def use_the_tool_then_say_what_it_said(prompt) -> str:
    last = prompt[-1]
    return str(last["content"]) if last["role"] == "tool" else call_of("add", json.dumps({"a": 2, "b": 3}))


def test_tools_are_called_and_what_they_say_is_masked():
    env = vf.ToolEnv(tools=[add], dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[is_right]), max_turns=4)
    rollout = run(env, use_the_tool_then_say_what_it_said)[0]
    assert (rollout.reward, rollout.num_turns) == (1.0, 2)
    assert [message["role"] for message in rollout.completion] == ["assistant", "tool", "assistant"]
    assert rollout.completion[1]["content"] == "5"
    sampled = sum(sample.num_loss_tokens for sample in rollout.samples)
    assert sampled == len(call_of("add", json.dumps({"a": 2, "b": 3}))) + len("5")


class Counter(vf.StatefulToolEnv):
    """An environment whose tool adds to each rollout's own number."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_tool(self.increase, args_to_skip=["state"])

    async def setup_state(self, state, **kwargs):
        state["number"] = 0
        return await super().setup_state(state, **kwargs)

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "state": state}

    def increase(self, by: int, state: dict) -> str:
        """Adds to the number.

        Args:
            by: how much.
        """
        state["number"] += by
        return str(state["number"])


def test_tools_with_state_keep_it_apart_for_each_rollout():
    def twice(prompt) -> str:
        calls = sum(message["role"] == "tool" for message in prompt)
        return call_of("increase", '{"by": 2}') if calls < 2 else str(prompt[-1]["content"])

    def number_reached(state, **kwargs) -> float:
        return float(state["number"])

    env = Counter(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[number_reached]), max_turns=6)
    assert [rollout.reward for rollout in run(env, twice, num_rollouts=3)] == [4.0, 4.0, 4.0]


def test_each_example_of_a_group_of_environments_is_played_and_scored_by_its_own():
    def longest(completion, **kwargs) -> float:
        return float(len(completion[-1]["content"]))

    exact = vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS[:1]), rubric=vf.Rubric(funcs=[is_right]))
    long = vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS[1:]), rubric=vf.Rubric(funcs=[longest]))
    group = vf.EnvGroup(envs=[exact, long], env_names=["exact", "long"])
    assert [run(group, lambda prompt: "5", example_id=index)[0].reward for index in (0, 1)] == [1.0, 1.0]
    assert [run(group, lambda prompt: "555", example_id=index)[0].reward for index in (0, 1)] == [0.0, 3.0]


@pytest.mark.parametrize(("verdict", "reward"), [("yes", 1.0), ("no", 0.0)])
def test_a_judge_at_another_endpoint_decides(verdict, reward):
    asked = []

    def endpoint(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": verdict}}
        return httpx.Response(
            200, json={"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
        )

    http = httpx.AsyncClient(transport=httpx.MockTransport(endpoint))
    rubric = vf.JudgeRubric(
        judge_client=AsyncOpenAI(api_key="k", base_url="http://judge/v1", http_client=http), judge_model="judge"
    )

    async def judged(judge, prompt, completion, answer, state, **kwargs) -> float:
        return float("yes" in await judge(prompt, completion, answer, state))

    rubric.add_reward_func(judged)
    env = vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=rubric)
    assert run(env, lambda prompt: "5", num_rollouts=1)[0].reward == reward
    assert asked[0]["model"] == "judge"
