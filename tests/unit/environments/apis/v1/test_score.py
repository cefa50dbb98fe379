"""What becomes of a finished episode, in the shapes that verifiers 0.4 leaves: agents, branches, rewards that are missing."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verifiers.v1")


from trivet.environments.apis.turns import Turn
from trivet.environments.apis.v1.play import ServedTurns
from trivet.environments.apis.v1.score import to_rollout
from trivet.errors import RolloutFailed
from trivet.wire.groups import ServerAccess
from trivet.wire.rollouts import Rollout, TurnRun
from trivet.wire.versions import VersionRun
from trivet.wire.workers import HostSettings

QUESTION = SimpleNamespace(role="user", content="Sure?")


def reply(text: str) -> SimpleNamespace:
    return SimpleNamespace(role="assistant", content=text, tool_calls=None, reasoning_content=None, provider_state=None)


def node(message: Any, *, sampled: bool = False) -> SimpleNamespace:
    return SimpleNamespace(message=message, sampled=sampled)


def trace_of(
    branches: list[list[SimpleNamespace]],
    *,
    trace_id: str = "t",
    rewards: dict[str, float | None] | None = None,
    name: str = "agent",
    trainable: bool = True,
    is_kept: list[bool] | None = None,
) -> SimpleNamespace:
    """A trace with these paths from root to leaf; a node may be on several."""
    nodes = list({id(each): each for path in branches for each in path}.values())
    scored = {key: None if value is None else SimpleNamespace(score=value) for key, value in (rewards or {}).items()}
    kept = is_kept or [True] * len(branches)
    return SimpleNamespace(
        id=trace_id,
        nodes=nodes,
        branches=[SimpleNamespace(nodes=path, trainable=flag) for path, flag in zip(branches, kept, strict=True)],
        agent=SimpleNamespace(name=name, trainable=trainable, config=SimpleNamespace(sampling=None)),
        rewards=scored,
        metrics={"length": 2.0, "undefined": None},
        reward=sum(value for value in (rewards or {}).values() if value is not None),
        num_turns=sum(each.sampled for each in nodes),
        stop_condition="agent_completed",
        calls=[],
        timing=SimpleNamespace(agent=SimpleNamespace(duration=1.0), scoring=SimpleNamespace(duration=0.5)),
    )


SETTINGS = HostSettings(env_id="toy", name="toy", args={}, model_name="m", servers=ServerAccess(base_urls=[], key_variables=[]))


def read(*traces: SimpleNamespace, turns: ServedTurns | None = None) -> Rollout:
    data = SimpleNamespace(system_prompt=None, prompt="What?")
    episode: Any = SimpleNamespace(
        traces=list(traces), task=SimpleNamespace(data=data), num_turns=sum(each.num_turns for each in traces), usage=None
    )
    return to_rollout(episode, 0, settings=SETTINGS, find_turn=(turns or ServedTurns()).find)


def turn(prompt: list[int], completion: list[int]) -> Turn:
    return Turn(
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[-0.5] * len(completion),
        versions=[VersionRun(0, len(completion))],
    )


def served(*pairs: tuple[SimpleNamespace, Turn], trace_id: str = "t") -> ServedTurns:
    turns = ServedTurns()
    for each, of in pairs:
        turns.record(trace_id, each.message, of)
    return turns


def test_a_branch_that_was_given_up_and_a_message_that_was_rewritten_are_not_trained_on() -> None:
    asked, kept, dropped, rewritten = (
        node(QUESTION),
        node(reply("a"), sampled=True),
        node(reply("b"), sampled=True),
        node(reply("c"), sampled=True),
    )
    trace = trace_of([[asked, kept, rewritten], [asked, dropped]], rewards={"score": 1.0}, is_kept=[True, False])
    rollout = read(trace, turns=served((kept, turn([1], [2])), (dropped, turn([1], [3]))))
    assert [sample.token_ids_T.tolist() for sample in rollout.samples] == [[1, 2]]


def test_agents_are_trajectories_of_one_rollout_whose_reward_is_their_mean() -> None:
    said = [node(reply(text), sampled=True) for text in "abc"]
    solver = trace_of([[said[0]]], trace_id="1", rewards={"score": 1.0}, name="solver")
    critic = trace_of([[said[1]]], trace_id="2", rewards={"score": 0.0}, name="critic")
    judge = trace_of([[said[2]]], trace_id="3", rewards={"score": 5.0}, name="judge", trainable=False)
    turns = ServedTurns()
    for trace, each in zip((solver, critic, judge), said, strict=True):
        turns.record(trace.id, each.message, turn([1], [ord(each.message.content)]))
    rollout = read(solver, critic, judge, turns=turns)
    assert (rollout.reward, rollout.num_turns) == (0.5, 2)
    assert [sample.token_ids_T.tolist() for sample in rollout.samples] == [[1, ord("a")], [1, ord("b")]]
    assert [(sample.agent, sample.turns) for sample in rollout.samples] == [("solver", []), ("critic", [TurnRun(1, 1)])]
    assert (rollout.scores["solver/reward"], rollout.scores["critic/score"], rollout.scores["judge/score"]) == (1.0, 0.0, 5.0)
    assert [message["name"] for message in rollout.completion] == ["solver", "critic"]


@pytest.mark.parametrize(
    ("rewards", "kind", "said"),
    [
        ({"score": None}, "RewardMissing", "reward function score of environment 'toy' did not run to its end"),
        ({"score": float("inf")}, "RewardNotFinite", "inf, not a finite number"),
    ],
)
def test_a_reward_that_is_no_number_fails_the_group(rewards: dict[str, float | None], kind: str, said: str) -> None:
    with pytest.raises(RolloutFailed, match=said) as failed:
        read(trace_of([[node(QUESTION)]], rewards=rewards))
    assert failed.value.kind == kind
