import dataclasses

import httpx
import openai
import pytest
import verifiers as vf
from datasets import Dataset
from openai.types.chat import ChatCompletion

from support.scripted_model import ScriptedModel, call_of
from support.v0_host import ToyHost
from trivet.config.schema.environment import EvalSamplingConfig
from trivet.environments.apis import groups, messages
from trivet.environments.apis.v0.score import guard_rewards
from trivet.environments.settings import sampling_arguments
from trivet.errors import RolloutFailed
from trivet.wire.groups import SamplingArguments
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import VersionRun


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch):
    monkeypatch.setattr(groups, "_RETRY_DELAY_S", 0.0)


def make_host(reward, *, env_type=vf.SingleTurnEnv, **env_args) -> ToyHost:
    dataset = Dataset.from_list([{"question": "abc", "answer": "cba"}])
    env = env_type(dataset=dataset, rubric=vf.Rubric(funcs=[reward]), **env_args)
    return ToyHost(env=env)


def run(host: ToyHost, model: ScriptedModel, *, num_rollouts: int = 2, seed: int | None = None) -> list[Rollout]:
    return host.run(model, num_rollouts=num_rollouts, sampling=SamplingArguments(temperature=1.0, seed=seed))


def exact(completion, answer, **kwargs) -> float:
    return float(completion[-1]["content"] == answer)


def test_a_group_is_scored_and_its_tokens_are_those_the_server_reported():
    rollouts = run(make_host(exact), ScriptedModel(lambda prompt: "cba", version=3))
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    [sample] = rollouts[0].samples
    assert sample.token_ids_T.tolist() == [ord(character) for character in "abccba"]
    assert sample.loss_mask_T.tolist() == [False] * 3 + [True] * 3
    assert sample.versions == [VersionRun(3, 3)]
    assert rollouts[0].scores["exact"] == 1.0
    assert rollouts[0].completion == [{"role": "assistant", "content": "cba"}]


def test_an_empty_completion_is_a_rollout_without_samples():
    rollouts = run(make_host(exact), ScriptedModel(lambda prompt: ""))
    assert rollouts[0].reward == 0.0
    assert rollouts[0].samples == []


def test_each_rollout_has_its_own_seed_that_depends_on_group_and_index():
    def seeds(run_seed: int) -> list[int]:
        model = ScriptedModel(lambda prompt: "x")
        run(make_host(exact), model, num_rollouts=3, seed=run_seed)
        return [request["sampling_args"]["seed"] for request in model.requests]

    assert len(set(seeds(1))) == 3
    assert seeds(1) == seeds(1)
    assert seeds(1) != seeds(2)


def raises(**kwargs) -> float:
    raise KeyError("letter")


def test_an_error_in_a_reward_function_fails_its_group_or_counts_zero_where_that_is_asked_for():
    host, model = make_host(raises), ScriptedModel(lambda prompt: "x")
    guard_rewards(host.env)
    with pytest.raises(RolloutFailed, match="reward function raises of environment 'toy': KeyError: 'letter'") as failed:
        run(host, model)
    assert failed.value.kind == "KeyError"
    rollouts = run(dataclasses.replace(host, settings={"on_reward_error": "zero"}), model)
    assert [rollout.reward for rollout in rollouts] == [0.0, 0.0]


class BreakableEnv(vf.MultiTurnEnv):
    """Each answer makes `env_response` raise what `errors` has next for it; without an error it says more."""

    errors: dict[str, list[Exception]]

    async def env_response(self, messages, state, **kwargs):
        if left := self.errors.get(messages[-1].content):
            raise left.pop(0)
        return [{"role": "user", "content": "more"}]


def breakable(**errors: list[Exception]) -> ToyHost:
    host = make_host(lambda **kwargs: 1.0, env_type=BreakableEnv, max_turns=2)
    host.env.errors = errors  # type: ignore[attr-defined]
    return host


def test_an_answer_that_breaks_the_environment_is_not_replaced_by_one_that_does_not():
    answers = iter(["bad", "good", "good", "good", "good"])
    model = ScriptedModel(lambda prompt: next(answers))
    with pytest.raises(RolloutFailed, match="KeyError: 'no such move'") as failed:
        run(breakable(bad=[KeyError("no such move")]), model, num_rollouts=1)
    assert (failed.value.kind, failed.value.is_infrastructure) == ("KeyError", False)
    assert len(model.requests) == 1


@pytest.mark.parametrize("error", [vf.SandboxError("gone"), ConnectionResetError("by peer")], ids=repr)
def test_an_environment_whose_infrastructure_failed_is_played_again(error: Exception):
    model = ScriptedModel(lambda prompt: "ok")
    [rollout] = run(breakable(ok=[error]), model, num_rollouts=1)
    assert (rollout.num_retries, rollout.num_turns, rollout.ended_by) == (1, 2, "")
    assert len(model.requests) == 3


def test_a_request_that_the_server_refuses_is_not_repeated():
    response = httpx.Response(400, request=httpx.Request("POST", "http://server"))
    error = openai.BadRequestError("arguments are no JSON", response=response, body=None)
    model = ScriptedModel(lambda prompt: "cba", errors=[error])
    with pytest.raises(RolloutFailed, match="BadRequestError: arguments are no JSON") as failed:
        run(make_host(exact), model, num_rollouts=1)
    assert not failed.value.is_infrastructure
    assert len(model.requests) == 1


def divide(by: int) -> str:
    """Divides 6.

    Args:
        by: what by.
    """
    if by == 9:
        raise ConnectionError("the tool's server is down")
    return str(6 / by)


@pytest.mark.parametrize("call", ['{"by": 0}', "no JSON"])
def test_a_call_that_ends_its_rollout_is_scored_as_verifiers_scores_it(call: str):
    model = ScriptedModel(lambda prompt: call_of("divide", call))
    host = make_host(lambda **kwargs: -1.0, env_type=vf.ToolEnv, tools=[divide], stop_errors=[Exception])
    first, second = run(host, model)
    assert (first.reward, second.reward) == (-1.0, -1.0)
    assert first.ended_by == ("ToolCallError" if "0" in call else "ToolParseError")
    assert (first.num_turns, first.num_retries, len(model.requests)) == (1, 0, 2)
    assert int(first.samples[0].loss_mask_T.sum()) == len(call_of("divide", call))


def test_a_call_whose_tool_cannot_be_reached_is_played_again():
    answers = iter([call_of("divide", '{"by": 9}'), "fine"])
    model = ScriptedModel(lambda prompt: next(answers))
    host = make_host(lambda **kwargs: 1.0, env_type=vf.ToolEnv, tools=[divide], stop_errors=[Exception])
    [rollout] = run(host, model, num_rollouts=1)
    assert (rollout.num_retries, rollout.ended_by) == (1, "")


def test_long_texts_are_cut_where_they_are_kept_to_be_read_and_tokens_are_not(monkeypatch):
    length = 21
    monkeypatch.setattr(messages, "_MAX_TEXT_CHARS", length - 1)
    [rollout] = run(make_host(exact), ScriptedModel(lambda prompt: "x" * length), num_rollouts=1)
    assert rollout.completion[0]["content"].endswith(f"… ({length} characters)")
    assert rollout.samples[0].num_loss_tokens == length


def without_tokens(model: ScriptedModel, *, finish_reason: str = "stop") -> ScriptedModel:
    """Remove from an answer what only our server sends."""
    ours = model.get_native_response

    async def answer(*args, **kwargs):
        body = (await ours(*args, **kwargs)).model_dump()
        del body["prompt_token_ids"]
        [choice] = body["choices"]
        text = choice["message"]["content"]
        body["choices"] = [
            {"index": 0, "finish_reason": finish_reason, "logprobs": None, "message": {"role": "assistant", "content": text}}
        ]
        body["usage"] = {"prompt_tokens": 3, "completion_tokens": len(text), "total_tokens": 3 + len(text)}
        return ChatCompletion.model_validate(body)

    model.get_native_response = answer
    return model


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_server_that_answers_text_alone_gives_scored_rollouts_without_samples(finish_reason):
    model = without_tokens(ScriptedModel(lambda prompt: "cba"), finish_reason=finish_reason)
    [rollout] = run(dataclasses.replace(make_host(exact), settings={"is_plain": True}), model, num_rollouts=1)
    assert (rollout.reward, rollout.samples, rollout.num_completion_tokens) == (1.0, [], 3)
    assert rollout.is_truncated is (finish_reason == "length")


def test_a_server_that_is_none_of_ours_is_sent_only_what_was_asked_for():
    model = without_tokens(ScriptedModel(lambda prompt: "cba"))
    host = dataclasses.replace(make_host(exact), settings={"is_plain": True})
    sampling = sampling_arguments(EvalSamplingConfig(max_tokens=8, top_k=5), temperature=0.0)
    host.run(model, num_rollouts=1, sampling=sampling)
    sent = {name: value for name, value in model.requests[0]["sampling_args"].items() if value is not None}
    assert sent == {"temperature": 0.0, "max_tokens": 8, "extra_body": {"top_k": 5}}
