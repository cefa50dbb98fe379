"""The numbers of one step, from the groups of its batch and what happened since the last one."""

from collections.abc import Callable, Sequence

import numpy as np

from trivet.algorithms.staleness import staleness
from trivet.orchestrator.buffer import Tally
from trivet.orchestrator.checkpoint import Progress
from trivet.wire.rollouts import Group, Rollout
from trivet.wire.versions import PolicyVersion, Step


def batch_metrics(groups: Sequence[Group], *, step: Step, num_tokens: int) -> dict[str, float]:
    """What can be read off the groups alone.

    Args:
        num_tokens: packed tokens of the batch.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    values = {"reward/mean": _mean(rollout.reward for rollout in rollouts)}
    by_env: dict[str, list[Rollout]] = {}
    for group in groups:
        by_env.setdefault(group.env, []).extend(group.rollouts)
    for env, members in by_env.items():
        values[f"reward/{env}"] = _mean(rollout.reward for rollout in members)
        values[f"batch/{env}"] = len(members) / len(rollouts)
    for name in sorted({name for rollout in rollouts for name in rollout.scores}):
        values[f"metrics/{name}"] = _mean(rollout.scores[name] for rollout in rollouts if name in rollout.scores)
    measures: dict[str, Callable[[Rollout], float]] = {
        "reward": lambda rollout: rollout.reward,
        "seq_len": lambda rollout: float(sum(sample.num_tokens for sample in rollout.samples)),
        "completion_len": lambda rollout: float(sum(sample.num_loss_tokens for sample in rollout.samples)),
        "is_truncated": lambda rollout: float(rollout.is_truncated),
        "num_turns": lambda rollout: float(rollout.num_turns),
        "generation_ms": lambda rollout: rollout.generation_s * 1e3,
        "scoring_ms": lambda rollout: rollout.scoring_s * 1e3,
    }
    for name, measure in measures.items():
        column = np.array([measure(rollout) for rollout in rollouts])
        values |= {f"{name}/mean": column.mean(), f"{name}/max": column.max(), f"{name}/min": column.min()}
    values["prompt_len/mean"] = values["seq_len/mean"] - values["completion_len/mean"]
    age = np.array([staleness(step=step, oldest=group.oldest_version) for group in groups])
    values |= {
        "batch/loss_tokens": sum(sample.num_loss_tokens for rollout in rollouts for sample in rollout.samples),
        "batch/off_policy_level/mean": age.mean(),
        "batch/off_policy_level/max": age.max(),
        "batch/off_policy_level/min": age.min(),
        "progress/tokens": num_tokens,
        "progress/samples": len(rollouts),
        "progress/problems": len(groups),
    }
    return {name: float(value) for name, value in values.items()}


def flow_metrics(
    tally: Tally, groups: Sequence[Group], *, version: PolicyVersion, step: Step, num_in_flight: int, num_ready: int
) -> dict[str, float]:
    """What became of the groups that ended since the last batch, and what is under way."""
    means = [group.rewards.mean() for group in groups]
    zero = [np.ptp(group.rewards) == 0 for group in groups]
    solve_none = sum(bool(flat) and mean == 0 for flat, mean in zip(zero, means, strict=True))
    solve_all = sum(bool(flat) and mean > 0 for flat, mean in zip(zero, means, strict=True))
    solve_all += tally.filtered_solve_all
    solve_none += tally.filtered - tally.filtered_solve_all
    judged = max(len(groups) + tally.filtered, 1)
    ended = max(tally.finished + tally.failed, 1)
    return {
        "batch/solve_none": solve_none / judged,
        "batch/solve_all": solve_all / judged,
        "batch/effective_batch_size": 1.0 - (solve_none + solve_all) / judged,
        "batch/filtered_groups": float(tally.filtered),
        "batch/stale_groups": float(tally.stale),
        "batch/async_level": float(step - 1 - version),
        "batch/inflight_groups": float(num_in_flight),
        "batch/ready_groups": float(num_ready),
        "error/mean": tally.failed / ended,
    }


def progress_metrics(progress: Progress, *, version: PolicyVersion) -> dict[str, float]:
    return {
        "progress/total_tokens": float(progress.total_tokens),
        "progress/total_samples": float(progress.total_samples),
        "progress/total_problems": float(progress.total_problems),
        "progress/ckpt_step": float(version),
    }


def _mean(values: object) -> float:
    return float(np.mean(list(values)))  # type: ignore[call-overload]  # any iterable of numbers
