"""Computes the metrics of one step from the groups of its batch and from all groups that ended since the last batch.

With several environments, each metric is computed over all of them, and again for each with `/<env>` appended to its name. A
metric without a value in a step is left out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from trivet.algorithms.difficulty import has_passed
from trivet.algorithms.dispatching import staleness
from trivet.orchestrator.buffer import FinishedGroup, GroupCounters
from trivet.orchestrator.checkpoint import RunTotals
from trivet.orchestrator.filters import FilterReason, RolloutFilter
from trivet.wire.rollouts import Group, Rollout
from trivet.wire.versions import PolicyVersion, Step, count_tokens

_MEASURES: dict[str, Callable[[Rollout], float]] = {
    "reward": lambda rollout: rollout.reward,
    "seq_len": lambda rollout: float(sum(sample.num_tokens for sample in rollout.samples)),
    "prompt_len": lambda rollout: float(sum(sample.num_tokens - count_tokens(sample.versions) for sample in rollout.samples)),
    "completion_len": lambda rollout: float(sum(count_tokens(sample.versions) for sample in rollout.samples)),
    "is_truncated": lambda rollout: float(rollout.is_truncated),
    "num_turns": lambda rollout: float(rollout.num_turns),
    "num_retries": lambda rollout: float(rollout.num_retries),
    "ended_by_error": lambda rollout: float(bool(rollout.ended_by)),
    "generation_ms": lambda rollout: rollout.generation_s * 1e3,
    "scoring_ms": lambda rollout: rollout.scoring_s * 1e3,
}
"""Values of one rollout by metric name. Mean, maximum and minimum over the rollouts are reported."""


def batch_metrics(groups: Sequence[Group], *, step: Step, num_tokens: int) -> dict[str, float]:
    """Return the metrics that need only the groups of the batch.

    Args:
        num_tokens: tokens in all packed rows of the batch, prompts included.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    by_env: dict[str, list[Rollout]] = {}
    for group in groups:
        by_env.setdefault(group.env, []).extend(group.rollouts)
    values = _rollout_metrics(rollouts)
    for env, members in by_env.items():
        values[f"batch/{env}"] = len(members) / len(rollouts)
        values[f"reward/{env}"] = _mean(rollout.reward for rollout in members)
        if len(by_env) > 1:
            values |= {f"{name}/{env}": value for name, value in _rollout_metrics(members).items()}
    group_staleness = np.array([staleness(step=step, oldest=group.oldest_version) for group in groups])
    tokens_by_staleness: Counter[int] = Counter()
    for run in (run for rollout in rollouts for sample in rollout.samples for run in sample.versions):
        tokens_by_staleness[staleness(step=step, oldest=run.version)] += run.length
    values |= {
        "batch/off_policy_level/mean": float(group_staleness.mean()),
        "batch/off_policy_level/max": float(group_staleness.max()),
        "batch/off_policy_level/min": float(group_staleness.min()),
        **{f"batch/off_policy_tokens/{level}": float(tokens_by_staleness[level]) for level in sorted(tokens_by_staleness)},
        "batch/loss_tokens": float(sum(sample.num_loss_tokens for rollout in rollouts for sample in rollout.samples)),
        "progress/tokens": float(num_tokens),
        "progress/samples": float(len(rollouts)),
        "progress/problems": float(len(groups)),
    }
    return values


def flow_metrics(
    counters: GroupCounters,
    groups: Sequence[Group],
    *,
    version: PolicyVersion,
    step: Step,
    group_size: int,
    num_in_flight: int,
    num_ready: int,
) -> dict[str, float]:
    """Return the metrics of the groups that ended since the last batch, and of the groups in flight.

    `error/*` are the failed groups as shares of the groups that ended, by cause, by error type, and by environment and type.

    Args:
        groups: the groups of batch `step`.
        version: the served policy.
        group_size: rollouts of each group.
        num_in_flight: groups that are being generated or scored.
        num_ready: finished groups that wait for a batch.
    """
    filtered = [group for group in counters.finished if group.filtered is not None]
    judged = [*(FinishedGroup.of(group) for group in groups), *filtered]
    values = _judged_metrics(judged) | _finished_metrics(counters.finished)
    num_stale = sum(group.reason == "stale" for group in counters.dropped)
    failed = counters.failed
    if ended := len(counters.finished) + len(failed):
        num_infrastructure = sum(group.is_infrastructure for group in failed)
        values["error/mean"] = len(failed) / ended
        values["error/infrastructure"] = num_infrastructure / ended
        values["error/environment"] = (len(failed) - num_infrastructure) / ended
        causes = Counter(name for group in failed for name in (group.reason, f"{group.env}/{group.reason}"))
        values |= {f"error/{name}": count / ended for name, count in causes.items()}
    envs = {group.env for group in judged}
    for env in sorted(envs) if len(envs) > 1 else ():
        env_values = _judged_metrics([group for group in judged if group.env == env])
        env_values |= _finished_metrics([group for group in counters.finished if group.env == env])
        values |= {f"{name}/{env}": value for name, value in env_values.items()}
    return values | {
        "batch/async_level": float(step - 1 - version),
        "batch/inflight_groups": float(num_in_flight),
        "batch/inflight_rollouts": float(num_in_flight * group_size),
        "batch/stale_groups": float(num_stale),
        "batch/cancelled_rollouts": float(num_stale * group_size),
        "batch/ready_groups": float(num_ready),
        "batch/overlong_prompts": float(sum(group.filtered is FilterReason.OVERLONG_PROMPT for group in filtered)),
    }


def progress_metrics(progress: RunTotals, *, version: PolicyVersion) -> dict[str, float]:
    """Return the totals of the run as `progress/*`."""
    return {
        "progress/total_tokens": float(progress.total_tokens),
        "progress/total_samples": float(progress.total_samples),
        "progress/total_problems": float(progress.total_problems),
        # The version of the served policy, not the step of a checkpoint.
        "progress/ckpt_step": float(version),
    }


def _rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, measure in _MEASURES.items():
        column = np.array([measure(rollout) for rollout in rollouts])
        values |= {f"{name}/mean": float(column.mean()), f"{name}/max": float(column.max()), f"{name}/min": float(column.min())}
    for name in sorted({name for rollout in rollouts for name in rollout.scores}):
        values[f"metrics/{name}"] = _mean(rollout.scores[name] for rollout in rollouts if name in rollout.scores)
    if temperatures := [sample.temperature for rollout in rollouts for sample in rollout.samples]:
        values["sampling/temperature"] = _mean(temperatures)
    return values


def _judged_metrics(judged: Sequence[FinishedGroup]) -> dict[str, float]:
    """Return the metrics of `judged`: the groups in the batch, and those that a filter kept out of it.

    A group is flat when its rewards are equal, and its advantages too: with a baseline they are 0, and it gives no gradient.
    """
    if not judged:
        return {}
    flat = [group for group in judged if group.is_flat]
    passed = [[has_passed(reward) for reward in group.rewards.tolist()] for group in judged]
    values = {
        "batch/solve_none": sum(not group.is_solved for group in flat) / len(judged),
        "batch/solve_all": sum(group.is_solved for group in flat) / len(judged),
        # A share, not a number of rollouts: the groups whose rewards or advantages differ.
        "batch/effective_batch_size": (len(judged) - len(flat)) / len(judged),
        "pass@1": _mean(sum(rollouts) / len(rollouts) for rollouts in passed),
    }
    size = len(passed[0])
    return values | ({f"pass@{size}": _mean(any(rollouts) for rollouts in passed)} if size > 1 else {})


def _finished_metrics(finished: Sequence[FinishedGroup]) -> dict[str, float]:
    """Return `filtered_rollouts/*`, the shares of the finished rollouts by filter reason, and the number of filtered groups."""
    filtered = [group for group in finished if group.filtered is not None]
    values = {"batch/filtered_groups": float(len(filtered))}
    num_rollouts = sum(len(group.rewards) for group in finished)
    if not num_rollouts:
        return values
    flat = [group for group in filtered if group.filtered is FilterReason.ZERO_SIGNAL]
    counts = {
        "easy": sum(len(group.rewards) for group in flat if group.is_solved),
        "hard": sum(len(group.rewards) for group in flat if not group.is_solved),
        **{name.value: sum(group.matches.count(name) for group in finished) for name in RolloutFilter},
    }
    return values | {f"filtered_rollouts/{name}": count / num_rollouts for name, count in counts.items()}


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
