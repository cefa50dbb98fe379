"""Recorded rollouts get the scores that the rubric gives them today, without a request to a server."""

from typing import Any

import pytest
import verifiers as vf
from datasets import Dataset

from support.scripted_model import ScriptedModel
from support.v0_host import ToyHost
from trivet.environments.apis.messages import PROMPT_DIFFERS
from trivet.environments.apis.v0.score import guard_rewards
from trivet.errors import RolloutFailed
from trivet.wire.groups import RecordedConversation
from trivet.wire.rollouts import Rollout

ROWS = [{"question": "2+3", "answer": "5", "info": {"bonus": 0.5}}]


def is_right(completion, answer, info, **kwargs) -> float:
    return float(completion[-1]["content"] == answer) * (1 + info["bonus"])


def num_steps(state, **kwargs) -> float:
    return float(len(state["trajectory"]))


def remembers(state, **kwargs) -> float:
    return float(state["number"])


def refuse_to_answer(prompt: Any) -> str:
    raise AssertionError("a model was asked")


def environment(*functions: Any) -> vf.Environment:
    rubric = vf.Rubric(funcs=list(functions), weights=[1.0] * len(functions))
    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), system_prompt="add", rubric=rubric)


def conversation(*said: str, question: str = "2+3") -> RecordedConversation:
    completion: list[dict[str, Any]] = []
    for text in said:
        completion += [{"role": "user", "content": "sure?"}] * bool(completion) + [{"role": "assistant", "content": text}]
    return RecordedConversation(
        prompt=[{"role": "system", "content": "add"}, {"role": "user", "content": question}], completion=completion
    )


def rescore(env: vf.Environment, *recorded: RecordedConversation) -> list[Rollout]:
    guard_rewards(env)
    host = ToyHost(env=env, settings={"on_reward_error": "zero"})
    return host.run(ScriptedModel(refuse_to_answer), num_rollouts=len(recorded), recorded=list(recorded))


def test_answer_and_info_come_from_the_example() -> None:
    rollouts = rescore(environment(is_right), conversation("5"), conversation("6"))
    assert [(rollout.index, rollout.reward, rollout.scores["is_right"]) for rollout in rollouts] == [
        (0, 1.5, 1.5),
        (1, 0.0, 0.0),
    ]


def test_the_trajectory_has_a_step_for_each_turn() -> None:
    [rollout] = rescore(environment(num_steps), conversation("4", "5"))
    assert (rollout.reward, rollout.num_turns, rollout.scores["num_turns"]) == (2.0, 2, 2.0)


def test_turn_rewards_of_todays_rubric_are_kept() -> None:
    def judge_turns(state, **kwargs) -> float:
        state["turn_rewards"] = [float(step["completion"][0]["content"]) for step in state["trajectory"]]
        return 0.0

    [rollout] = rescore(environment(judge_turns), conversation("4", "5"))
    assert rollout.turn_rewards == [4.0, 5.0]


def test_a_group_of_environments_scores_with_the_rubric_of_each() -> None:
    groups = vf.EnvGroup(envs=[environment(is_right), environment(num_steps)], env_names=["a", "b"])
    assert rescore(groups, conversation("5"))[0].reward == 1.5


def test_what_the_environment_kept_in_its_state_is_missing_and_named_even_where_errors_count_zero() -> None:
    with pytest.raises(RolloutFailed, match="reward function remembers of environment 'toy': KeyError: 'number'"):
        rescore(environment(remembers), conversation("5"))


def test_another_prompt_is_not_comparable() -> None:
    with pytest.raises(RolloutFailed) as caught:
        rescore(environment(is_right), conversation("5", question="2+4"))
    assert caught.value.kind == PROMPT_DIFFERS
