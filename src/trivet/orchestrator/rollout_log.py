"""Writes `rollouts/step_N/rollouts.jsonl`: what was trained in step N, for a human to read."""

from collections.abc import Sequence

import msgspec

from trivet.config.layout import RunLayout
from trivet.wire.rollouts import Group, Rollout
from trivet.wire.versions import Step, VersionRun


class RolloutRecord(msgspec.Struct, kw_only=True):
    group_id: int
    env: str
    example_id: int
    index: int
    reward: float
    advantage: float
    scores: dict[str, float]
    num_turns: int
    is_truncated: bool
    versions: list[VersionRun]
    """Policy of the sampled tokens, run-length encoded."""
    prompt: list[dict[str, object]]
    completion: list[dict[str, object]]


def write_rollouts(layout: RunLayout, step: Step, groups: Sequence[Group]) -> None:
    directory = layout.rollouts_step(step)
    directory.mkdir(parents=True, exist_ok=True)
    encoder = msgspec.json.Encoder()
    with (directory / "rollouts.jsonl").open("wb") as file:
        for group in groups:
            for rollout in group.rollouts:
                file.write(encoder.encode(_record(group, rollout)) + b"\n")


def _record(group: Group, rollout: Rollout) -> RolloutRecord:
    return RolloutRecord(
        group_id=group.group_id,
        env=group.env,
        example_id=group.example_id,
        index=rollout.index,
        reward=rollout.reward,
        advantage=rollout.advantage,
        scores=rollout.scores,
        num_turns=rollout.num_turns,
        is_truncated=rollout.is_truncated,
        versions=[run for sample in rollout.samples for run in sample.versions],
        prompt=rollout.prompt,
        completion=rollout.completion,
    )
