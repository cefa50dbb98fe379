"""Computes the advantages of a group's rollouts from their rewards.

The orchestrator's buffer calls it with the complete group, before any filter, so that filtered rollouts count for the baseline.
Each function takes the group's `AdvantageInputs` and returns one float64 for each rollout, or for each rollout an array with one
for each sampled token. A reward that differs from its baseline only by rounding has an advantage of exactly 0.
Legend: G rollouts of the group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trivet.algorithms.arithmetic import rounding_error
from trivet.algorithms.credit import collect_token_ids, count_turn_tokens, find_turn_agents
from trivet.wire.rollouts import Group
from trivet.wire.versions import count_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """Everything that an advantage may depend on."""

    rewards: np.ndarray
    """float64 [G], finite."""
    completion_lengths: np.ndarray
    """int64 [G]: tokens that the policy sampled."""
    scores: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    """By the name of a reward function or metric, float64 [G]: its value for each rollout; NaN where it has none."""
    turn_lengths: Sequence[np.ndarray] = ()
    """For each rollout, int64 [turns]: sampled tokens of each turn; 0 for a turn that was empty or is cut away."""
    turn_rewards: Sequence[np.ndarray] = ()
    """For each rollout, float64 [turns]: the reward of each turn; of length 0 if the environment gives none."""
    turn_agents: Sequence[Sequence[str]] = ()
    """For each rollout, the agent of each turn; empty in an episode of one agent, and for a turn without sampled tokens. The
    reward of an agent is the score `AGENT/reward`."""
    token_ids: Sequence[np.ndarray] = ()
    """For each rollout, int32: the sampled tokens, turn by turn."""

    @classmethod
    def from_group(cls, group: Group, *, zeroes_truncated: bool = False, has_all: bool = True) -> "AdvantageInputs":
        """Return the inputs of a finished group.

        Args:
            zeroes_truncated: other rewards of truncated rollouts count as 0 too.
            has_all: false: only rewards and lengths, for functions that read no more. The rest takes ten times as long.
        """
        lengths = [sum(count_tokens(sample.versions) for sample in rollout.samples) for rollout in group.rollouts]
        rewards, completion_lengths = group.rewards, np.array(lengths, dtype=np.int64)
        if not has_all:
            return cls(rewards=rewards, completion_lengths=completion_lengths)
        is_zero = np.array([zeroes_truncated and rollout.is_truncated for rollout in group.rollouts])
        scores = {
            name: np.array([rollout.scores.get(name, np.nan) for rollout in group.rollouts]) * ~is_zero
            for name in sorted({name for rollout in group.rollouts for name in rollout.scores})
        }
        return cls(
            rewards=rewards,
            completion_lengths=completion_lengths,
            scores=scores,
            turn_lengths=[count_turn_tokens(rollout) for rollout in group.rollouts],
            turn_rewards=[
                np.array(rollout.turn_rewards, dtype=np.float64) * (not zero)
                for rollout, zero in zip(group.rollouts, is_zero, strict=True)
            ],
            turn_agents=[find_turn_agents(rollout) for rollout in group.rollouts],
            token_ids=[collect_token_ids(rollout) for rollout in group.rollouts],
        )

    def per_token(self, values_of_turns: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return for each rollout the value of its turn for each sampled token.

        Args:
            values_of_turns: for each rollout, an array [turns].

        Raises:
            ValueError: a rollout has another number of turns.
        """
        for index, (values, lengths) in enumerate(zip(values_of_turns, self.turn_lengths, strict=True)):
            if len(values) != len(lengths):
                raise ValueError(
                    f"got {len(values)} values for the turns of rollout {index}, must be {len(lengths)}: one per turn"
                )
        return [np.repeat(values, lengths) for values, lengths in zip(values_of_turns, self.turn_lengths, strict=True)]


Advantages = np.ndarray | list[np.ndarray]
"""float64 [G], or for each rollout float64 [sampled tokens], turn by turn."""
AdvantageFunction = Callable[[AdvantageInputs], Advantages]


def _subtract(baseline: np.ndarray | float, rewards: np.ndarray) -> np.ndarray:
    """Return `rewards` minus the `baseline` that was computed from them; exactly 0 where both differ only by rounding."""
    differences = rewards - baseline
    return np.where(np.abs(differences) <= rounding_error(rewards), 0.0, differences)


def mean_baseline(inputs: AdvantageInputs) -> np.ndarray:
    """Compute A_i = R_i - mean(R), without division by the standard deviation.

    Source: Dr. GRPO (arXiv 2503.20783), section 3; the default of prime-rl.
    """
    return _subtract(inputs.rewards.mean(), inputs.rewards)


def length_weighted_mean(inputs: AdvantageInputs) -> np.ndarray:
    """Compute A_i = R_i - sum_j(l_j R_j) / sum_j(l_j), with l the completion lengths. If all are empty, the baseline is the mean.

    This baseline has the least variance if the gradient's squared norm is proportional to the length.
    Source: OPO (arXiv 2505.23585), equation 7.
    """
    weights = inputs.completion_lengths
    if not weights.any():
        return mean_baseline(inputs)
    return _subtract(float(np.average(inputs.rewards, weights=weights)), inputs.rewards)


def leave_one_out(inputs: AdvantageInputs) -> np.ndarray:
    """Compute A_i = R_i - mean_{j != i}(R_j), which is G / (G - 1) times the default.

    Source: RLOO (arXiv 2402.14740), equation 7. G is at least 2.
    """
    rewards = inputs.rewards
    return _subtract((rewards.sum() - rewards) / (len(rewards) - 1), rewards)


def standardised(inputs: AdvantageInputs, *, eps: float) -> np.ndarray:
    """Compute A_i = (R_i - mean(R)) / (std(R) + eps), with the sample standard deviation (G - 1 in the denominator).

    Source: GRPO (arXiv 2402.03300), section 4.1.2. G is at least 2.
    """
    return _standardise(inputs.rewards, eps=eps)


def _standardise(rewards: np.ndarray, *, eps: float) -> np.ndarray:
    return _subtract(rewards.mean(), rewards) / (rewards.std(ddof=1) + eps)


def standardised_components(inputs: AdvantageInputs, *, components: Mapping[str, float], eps: float) -> np.ndarray:
    """Compute A_i = sum_k(w_k (S_ki - mean(S_k)) / (std(S_k) + eps)) over the named scores S_k, with their weights w_k.

    A component with small differences counts as much as one with large ones. GDPO divides the sums by their deviation over the
    batch too; a group is finished before its batch is known, so that step is left out.
    Source: GDPO (arXiv 2601.05242), its normalization within the group. G is at least 2.

    Raises:
        ValueError: a rollout has no score of that name.
    """
    advantages = np.zeros_like(inputs.rewards)
    for name, weight in components.items():
        scores = inputs.scores.get(name)
        if scores is None or np.isnan(scores).any():
            known = ", ".join(name for name, values in inputs.scores.items() if not np.isnan(values).any())
            raise ValueError(f"component {name!r} is not a score of every rollout; these are: {known or 'none'}")
        advantages += weight * _standardise(scores, eps=eps)
    return advantages


def mean_normalised(inputs: AdvantageInputs) -> np.ndarray:
    """Compute A_i = (R_i - mean(R)) / mean(R): the rarer a success, the more it counts.

    All advantages are 0 if all rewards are.
    Source: MaxRL, as prime-rl implements it under the name `max_rl`.
    """
    rewards = inputs.rewards
    if rewards.min() < 0:
        raise ValueError(f"max_rl divides by the mean reward and needs rewards >= 0, got {rewards.min():g}")
    mean = rewards.mean()
    return _subtract(mean, rewards) / mean if mean > 0 else np.zeros_like(rewards)


def raw_rewards(inputs: AdvantageInputs) -> np.ndarray:
    """Compute A_i = R_i, without a baseline: for rewards that are already centred, or groups of one rollout."""
    return inputs.rewards.copy()


def turn_returns(inputs: AdvantageInputs) -> list[np.ndarray]:
    """Compute A_ik = Q_ik - mean_j(Q_jk) for turn k, with Q_ik = r_ik + r_i,k+1 + ... + R_i, the rewards from turn k on.

    The mean is over the rollouts that have a turn k, so where only one has it, its advantage is 0. The reward of the rollout comes
    after its last turn, and must not contain the turn rewards.
    Source: rewards to go with a baseline for each time step (Sutton and Barto, section 13.4), the mean of the group as baseline.

    Raises:
        ValueError: a rollout has no turn rewards.
    """
    returns: list[np.ndarray] = []
    for index, (reward, rewards, lengths) in enumerate(
        zip(inputs.rewards, inputs.turn_rewards, inputs.turn_lengths, strict=True)
    ):
        if len(rewards) != len(lengths):
            raise ValueError(
                f"rollout {index} has {len(lengths)} turns and {len(rewards)} turn rewards;"
                " the environment has to give one per turn"
            )
        returns.append(reward + np.cumsum(rewards[::-1])[::-1])
    for turn in range(max(map(len, returns))):
        having = [values for values in returns if len(values) > turn]
        column = np.array([values[turn] for values in having])
        for values, centred in zip(having, _subtract(column.mean(), column), strict=True):
            values[turn] = centred
    return inputs.per_token(returns)


def agent_baselines(inputs: AdvantageInputs) -> list[np.ndarray]:
    """Compute A_ia = R_ia - mean_j(R_ja) for the tokens of agent a, over the rollouts j in which the agent has a reward.

    So an agent is compared with itself, and never with another agent, whose rewards may have another scale. In an episode of one
    agent it is the default.
    """
    by_agent = {"": _subtract(inputs.rewards.mean(), inputs.rewards)}
    for agent in sorted({agent for agents in inputs.turn_agents for agent in agents if agent}):
        rewards = inputs.scores[f"{agent}/reward"]
        has_played = ~np.isnan(rewards)
        by_agent[agent] = np.zeros_like(rewards)
        by_agent[agent][has_played] = _subtract(rewards[has_played].mean(), rewards[has_played])
    return inputs.per_token(
        [np.array([by_agent[agent][index] for agent in agents]) for index, agents in enumerate(inputs.turn_agents)]
    )
