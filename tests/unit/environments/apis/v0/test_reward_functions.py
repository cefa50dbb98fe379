"""Reward functions, tools and prompts in TRL's form become an environment, which the host plays and scores."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from support.scripted_model import ScriptedModel, call_of
from support.v0_host import ToyHost
from trivet.environments.apis.v0.play import ModelClient
from trivet.environments.apis.v0.reward_functions import load_environment
from trivet.environments.apis.v0.score import guard_rewards
from trivet.errors import RolloutFailed
from trivet.wire.groups import RecordedConversation, Split
from trivet.wire.rollouts import Rollout

CHAT = [{"role": "user", "content": "2+3"}]
ROWS = [{"prompt": CHAT, "solution": 5, "level": None}]


def host(
    *functions: Callable[..., Any],
    rows: list[dict[str, Any]] = ROWS,
    weights: tuple[float, ...] = (1.0, 1.0),
    **arguments: Any,
) -> ToyHost:
    env = load_environment(
        **{
            "rows": {Split.TRAIN: rows},
            "reward_funcs": {
                function.__name__: (function, weight) for function, weight in zip(functions, weights, strict=False)
            },
            "tools": [],
            "environment_factory": None,
            "max_turns": -1,
            "max_steps": 100,
            "examples_per_step": 2.0,
            **arguments,
        }
    )
    guard_rewards(env)
    return ToyHost(env=env)


def counting() -> ScriptedModel:
    """A model whose answers are 1, 2, 3, …"""
    answers = iter(range(1, 100))
    return ScriptedModel(lambda prompt: str(next(answers)), version=4)


def rewards_of(rollouts: list[Rollout]) -> list[float]:
    return [rollout.reward for rollout in rollouts]


def test_a_function_gets_lists_of_prompts_completions_columns_tokens_and_the_trainers_state() -> None:
    given: dict[str, Any] = {}

    def near(prompts, completions, completion_ids, solution, trainer_state, **kwargs) -> list[float]:
        given.update(kwargs, prompts=prompts, completions=completions, completion_ids=completion_ids, solution=solution)
        given["state"] = (trainer_state.global_step, trainer_state.max_steps, trainer_state.epoch)
        return [float(completion[0]["content"]) for completion in completions]

    rollouts = host(near).run(counting())
    assert rewards_of(rollouts) == [1.0, 2.0]
    assert given["prompts"] == [CHAT, CHAT]
    assert given["completions"] == [[{"role": "assistant", "content": text}] for text in ("1", "2")]
    assert (given["completion_ids"], given["solution"], given["level"]) == ([[ord("1")], [ord("2")]], [5, 5], [None, None])
    assert given["state"] == (4, 100, 8.0)


def test_functions_are_weighted_and_none_leaves_a_function_out() -> None:
    async def size(completions, **kwargs):
        await asyncio.sleep(0)
        return [float(completion[0]["content"]) for completion in completions]

    def odd_only(completions):
        return [10 if int(completion[0]["content"]) % 2 else None for completion in completions]

    rollouts = host(size, odd_only, weights=(2.0, 0.5)).run(counting())
    assert rewards_of(rollouts) == [2.0 + 5.0, 4.0]
    assert [rollout.scores.get("odd_only") for rollout in rollouts] == [10.0, None]


def test_a_rollout_that_no_function_scores_moves_nothing() -> None:
    def odd_only(completions, **kwargs):
        return [int(completion[0]["content"]) if int(completion[0]["content"]) % 2 else None for completion in completions]

    rollouts = host(odd_only).run(counting(), num_rollouts=3)
    assert rewards_of(rollouts) == [1.0, 2.0, 3.0]  # the second has the mean of the others, an advantage of 0
    assert [rollout.scores["unscored"] for rollout in rollouts] == [0.0, 1.0, 0.0]


def test_numbers_that_a_function_reports_are_metrics() -> None:
    def reports(completions, log_metric, log_extra, **kwargs):
        log_metric("share", 0.25)
        log_extra("size", [len(completion[0]["content"]) for completion in completions])
        log_extra("text", ["a", "b"])
        return [0.0, 1.0]

    assert [rollout.scores["share"] for rollout in host(reports).run(counting())] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "wrong of environment 'toy': ValueError: returned the list .*, of length 1 for the 2 rollouts"),
        (["a", "b"], "wrong of environment 'toy': TypeError: returned the str 'a', not a number"),
        (1.0, "wrong of environment 'toy': TypeError: returned the float 1.0, not a list of 2 numbers"),
        ([math.nan, 1.0], "wrong of environment 'toy': RewardNotFinite"),
    ],
)
def test_a_wrong_value_fails_the_group_under_the_functions_name(returned: object, message: str) -> None:
    def wrong(completions, **kwargs):
        return returned

    with pytest.raises(RolloutFailed, match=message):
        host(wrong).run(counting())


def test_recorded_rollouts_are_scored_again_without_what_was_not_recorded() -> None:
    def size(completions, **kwargs):
        return [float(len(completion[0]["content"])) for completion in completions]

    def num_tokens(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    recorded = [RecordedConversation(prompt=CHAT, completion=[{"role": "assistant", "content": text}]) for text in ("a", "bcd")]
    assert rewards_of(host(size).run(counting(), recorded=recorded)) == [1.0, 3.0]
    with pytest.raises(RolloutFailed, match=r"num_tokens .* asks for completion_ids, which a recorded rollout"):
        host(num_tokens).run(counting(), recorded=recorded)


def test_a_plain_text_is_continued_without_a_chat_template() -> None:
    bodies: list[tuple[str, dict[str, Any]]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        import json

        bodies.append((request.url.path, json.loads(request.content)))
        choice = {
            "index": 0,
            "text": " five",
            "finish_reason": "length",
            "logprobs": {"token_logprobs": [-0.5, -1.0], "tokens": ["", ""], "top_logprobs": None, "text_offset": [0, 1]},
            "token_ids": [7, 8],
            "prompt_token_ids": [1, 2, 3],
            "policy_versions": [[4, 2]],
        }
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        body = {"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        return httpx.Response(200, json=body)

    given: list[Any] = []

    def record(prompts, completions, **kwargs):
        given.extend((prompts, completions))
        return [1.0, 2.0]

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    client = ModelClient(AsyncOpenAI(base_url="http://fake/v1", api_key="x", http_client=http))
    rollouts = host(record, rows=[{"prompt": "2+3 is"}]).run(client)
    assert given == [["2+3 is"] * 2, [" five"] * 2]
    path, body = bodies[0]
    assert (path, body["prompt"], body["logprobs"], body["return_token_ids"]) == ("/v1/completions", "2+3 is", 0, True)
    [sample] = rollouts[0].samples
    assert (sample.token_ids_T.tolist(), sample.loss_mask_T.tolist()) == ([1, 2, 3, 7, 8], [False] * 3 + [True] * 2)
    assert sample.is_truncated
    assert sample.versions[0].version == 4


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


class Counter:
    """An object of one rollout."""

    def reset(self, *, solution: int, **row: Any) -> str:
        self.count = solution
        return f" from {solution}"

    async def increase(self, by: int) -> int:
        """Increase the number.

        Args:
            by: how much.
        """
        self.count += by
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


def test_functions_are_tools_and_messages_have_the_form_of_trl() -> None:
    given: list[Any] = []

    def record(completions):
        given.extend(completions)
        return [1.0, 1.0]

    def call_once(prompt) -> str:
        return "5" if prompt[-1]["role"] == "tool" else call_of("add", '{"a": 2, "b": 3}')

    rollouts = host(record, tools=[add]).run(ScriptedModel(call_once))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    assert given[0] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5", "name": "add"},
        {"role": "assistant", "content": "5"},
    ]
    assert rollouts[0].scores["total_tool_calls"] == 1.0


def test_each_rollout_has_an_object_of_its_own_which_may_own_the_reward() -> None:
    def counts(environments, **kwargs):
        return [float(own.count) for own in environments]

    prompts: list[str] = []

    def call_twice(prompt) -> str:
        prompts.append(prompt[0]["content"])
        num_calls = sum(message["role"] == "tool" for message in prompt)
        return "done" if num_calls == 2 else call_of("increase", '{"by": 1}')

    rollouts = host(counts, environment_factory=Counter).run(ScriptedModel(call_twice))
    assert rewards_of(rollouts) == [14.0, 14.0]  # 5 + 2 from the function, and as much from get_reward
    assert rollouts[0].scores["Counter"] == 7.0
    assert set(prompts) == {"2+3 from 5"}


def test_the_number_of_turns_with_tools_has_a_limit() -> None:
    def zero(completions, **kwargs):
        return [0.0 for _ in completions]

    rollouts = host(zero, tools=[add], max_turns=2).run(ScriptedModel(lambda prompt: call_of("nothing", "{}")))
    assert [rollout.num_turns for rollout in rollouts] == [2, 2]
