"""Runs the group of a draw in its environment, and makes of its rollouts the group that is trained on. Used by the dispatcher."""

from typing import Protocol

from trivet.algorithms.advantages import AdvantageFunction, AdvantageInputs
from trivet.algorithms.packing import truncate
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.port import EnvironmentPool
from trivet.environments.settings import sampling_arguments
from trivet.orchestrator.sampler import Draw
from trivet.wire.groups import GroupRequest
from trivet.wire.rollouts import Group, Rollout


class RunDrawnGroup(Protocol):
    """Runs groups."""

    async def __call__(self, draw: Draw, *, base_url: str) -> list[Rollout]:
        """Run the group of `draw` on one server and return its scored rollouts."""
        ...


def group_runner(pool: EnvironmentPool, config: OrchestratorConfig) -> RunDrawnGroup:
    """Return a `RunDrawnGroup` over a pool of environments.

    All requests of a group go to one server, so that its prompt is computed once. Its sampling follows from the draw alone, so
    that a group dispatched again is sampled alike.
    """
    by_env = {env.label: env.sampling.over(config.sampling) for env in config.env}

    async def run(draw: Draw, *, base_url: str) -> list[Rollout]:
        """Run the group of `draw` on the server at `base_url`, at the temperature of the draw's step."""
        sampling = by_env[draw.env]
        temperature = sampling.temperature_at(draw.step, max_steps=config.max_steps)
        return await pool.run_group(
            GroupRequest(
                group_id=draw.group_id,
                env=draw.env,
                example_id=draw.example_id,
                num_rollouts=config.rollouts_per_example,
                base_url=base_url,
                sampling=sampling_arguments(sampling, temperature=temperature),
            )
        )

    return run


def make_group(draw: Draw, rollouts: list[Rollout], *, config: OrchestratorConfig, advantage: AdvantageFunction) -> Group:
    """Return the group of `draw`: its samples cut to `seq_len`, rewards of cut rollouts as `config` says, advantages set."""
    group = Group(group_id=draw.group_id, env=draw.env, example_id=draw.example_id, rollouts=rollouts)
    for rollout in rollouts:
        rollout.samples = [truncate(sample, seq_len=config.seq_len) for sample in rollout.samples]
        if config.zero_truncated_completions and rollout.is_truncated:
            rollout.reward = 0.0
    for rollout, value in zip(rollouts, advantage(AdvantageInputs.of(group)), strict=True):
        rollout.advantage = float(value)
    return group
