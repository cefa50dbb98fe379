"""Runs the group of a draw in its environment, and makes of its rollouts the group that is trained on. Used by the dispatcher."""

from collections.abc import Callable, Sequence
from typing import Protocol

from trivet.algorithms.advantages import AdvantageFunction, AdvantageInputs
from trivet.algorithms.packing import truncate
from trivet.environments.port import EnvironmentPool
from trivet.orchestrator.dispatch_limits import Limits
from trivet.orchestrator.sampler import Draw
from trivet.wire.groups import GroupRequest, SamplingArguments
from trivet.wire.rollouts import Group, Rollout
from trivet.wire.versions import PolicyVersion


class RunDrawnGroup(Protocol):
    """Runs groups."""

    async def __call__(self, draw: Draw, *, base_url: str) -> list[Rollout]:
        """Run the group of `draw` on one server and return its scored rollouts."""
        ...


def group_runner(
    pool: EnvironmentPool, *, sampling_of: Callable[[Draw], SamplingArguments], rollouts_per_example: int
) -> RunDrawnGroup:
    """Return a `RunDrawnGroup` over a pool of environments.

    All requests of a group go to one server, so that its prompt is computed once.

    Args:
        sampling_of: asked when the group starts.
    """

    async def run(draw: Draw, *, base_url: str) -> list[Rollout]:
        """Run the group of `draw` on the server at `base_url`."""
        return await pool.run_group(
            GroupRequest(
                group_id=draw.group_id,
                env=draw.env,
                example_id=draw.example_id,
                num_rollouts=rollouts_per_example,
                base_url=base_url,
                sampling=sampling_of(draw),
            )
        )

    return run


def make_group(draw: Draw, rollouts: list[Rollout], *, limits: Limits, advantage: AdvantageFunction) -> Group:
    """Return the group of `draw`: its samples cut to `seq_len`, rewards of cut rollouts as `limits` say, advantages set."""
    group = Group(group_id=draw.group_id, env=draw.env, example_id=draw.example_id, rollouts=rollouts)
    for rollout in rollouts:
        rollout.samples = [truncate(sample, seq_len=limits.seq_len) for sample in rollout.samples]
        if limits.is_truncated_worth_nothing and rollout.is_truncated:
            rollout.reward = 0.0
    for rollout, value in zip(rollouts, advantage(AdvantageInputs.of(group)), strict=True):
        rollout.advantage = float(value)
    return group


def has_older_tokens(rollouts: Sequence[Rollout], version: PolicyVersion) -> bool:
    """Return whether a token of `rollouts` was sampled by an older policy than `version`."""
    return any(run.version < version for rollout in rollouts for sample in rollout.samples for run in sample.versions)
