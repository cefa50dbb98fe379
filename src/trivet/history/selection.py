"""Compares what a run trained with what it sampled, by the cause of the difference. For `trivet selection` and the page.

A group ends trained, filtered, stale or failed; single rollouts of a trained group may be masked. For a quantity x with mean m_t
over what was trained and m over all that was sampled, the bias is m_t - m. With the share p_c and the mean m_c of a cause c,
m_t - m is the sum of p_c (m_t - m_c) over the causes: what each cause adds to the bias. Intervals are those of the bootstrap over
groups.

Legend: U groups, C causes; the first cause is TRAINED.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from trivet.algorithms.resampling import find_interval
from trivet.config.layout import RunLayout
from trivet.errors import ConfigError, MessageRefused
from trivet.history.record import read_lines
from trivet.history.run_history import ORCHESTRATOR
from trivet.transport.recording import GROUPS_FILE, unpack_groups
from trivet.wire.events import AnyEvent, BatchFormed, Dispatch, Drop, Filter, Finish, Start
from trivet.wire.rollouts import Rollout

TRAINED, MASKED, TRUNCATED = "trained", "masked", "truncated"
_FAVOURED = {"tokens": (-1, "short"), "reward": (1, "easy"), "difficulty": (-1, "easy"), "latency_s": (0, "")}
"""The quantities, each with the sign of a bias that is warned of, and what that bias favours."""
_SMALLEST_BIAS = 0.05
"""Least bias that is warned of, in standard deviations over groups: a smaller one hardly changes what is learnt."""


class CauseEffect(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a quantity's bias that one cause adds."""

    cause: str
    num_groups: float
    """Groups that ended so and whose quantity is known; a masked rollout counts as its share of a group."""
    mean: float
    """Mean over these groups."""
    effect: float
    """What the cause adds to the bias; 0 for TRAINED. The effects of all causes add up to the bias."""
    interval: tuple[float, float]
    """95 % interval of the effect."""


class QuantityBias(msgspec.Struct, frozen=True, kw_only=True):
    """The bias in one quantity."""

    quantity: str
    num_unknown: int
    """Groups of which the quantity is unknown. They are left out."""
    sampled_mean: float
    trained_mean: float
    bias: float
    interval: tuple[float, float]
    causes: list[CauseEffect]


class SelectionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The object that `--json` prints."""

    num_groups: dict[str, float]
    """Ended groups by cause; a masked rollout counts as its share of a group."""
    biases: list[QuantityBias]
    """Of each quantity that is known of a trained group."""
    warnings: list[str]


@dataclass(slots=True, kw_only=True)
class EndedGroup:
    """A group from its dispatch to its end, or the part of a trained group whose rollouts were masked for one cause."""

    group_id: int
    env: str
    example_id: int
    started: float
    """Time of its last dispatch, Unix seconds."""
    cause: str = ""
    share: float = 1.0
    """Share of the group's rollouts that this part has."""
    values: dict[str, float] = field(default_factory=dict[str, float])
    """The quantities that are known, by name."""


def read_ended_groups(layout: RunLayout) -> list[EndedGroup]:
    """Return the groups that ended, without those that a resume voided. Groups with masked rollouts are in parts.

    Raises:
        ConfigError: the directory has no history of groups.
        HistoryError: a line of events.jsonl is not an event.
    """
    if not layout.events.exists():
        raise ConfigError(f"{str(layout.root)!r} holds no {layout.events.name}: no run wrote there; give the output_dir of one")
    groups, steps = follow_groups(line.event for line in read_lines(layout.events))
    if not groups:
        raise ConfigError(f"{layout.events} has no group that ended; give a run of rl that has trained a step")
    add_difficulty(list(groups.values()))
    parts = {group_id: [group] for group_id, group in groups.items()}
    for step in steps:
        try:
            recorded = unpack_groups((layout.rollouts_step(step) / GROUPS_FILE).read_bytes())
        except (OSError, MessageRefused):  # the run did not keep the rollouts of this step
            continue
        for group in recorded.groups:
            if group.group_id in groups and any(sample.masked for rollout in group.rollouts for sample in rollout.samples):
                parts[group.group_id] = _divide(groups[group.group_id], group.rollouts)
    return [part for of_group in parts.values() for part in of_group]


def follow_groups(events: Iterable[AnyEvent]) -> tuple[dict[int, EndedGroup], dict[int, int]]:
    """Return the groups that ended by id, in that order, and by step how many had ended when its batch was formed.

    A resume voids what came after its step.
    """
    seen: dict[int, EndedGroup] = {}
    order: list[int] = []
    """Ids of the groups that ended, in that order."""
    num_ended_at: dict[int, int] = {}
    for event in events:
        if isinstance(event, Start) and event.role == ORCHESTRATOR:
            num_ended_at = {step: count for step, count in num_ended_at.items() if step <= event.from_step}
            del order[num_ended_at.get(event.from_step, 0) :]
        elif isinstance(event, Dispatch):
            seen[event.group_id] = EndedGroup(
                group_id=event.group_id, env=event.env, example_id=event.example_id, started=event.time
            )
        elif isinstance(event, BatchFormed):
            ids = [group_id for group_id in event.group_ids if group_id in seen]
            for group_id in ids:
                seen[group_id].cause = TRAINED
            order += ids
            num_ended_at[event.step] = len(order)
        elif isinstance(event, Finish | Filter | Drop) and (group := seen.get(event.group_id)) is not None:
            if isinstance(event, Finish):
                tokens, latency_s = event.completion_tokens, event.time - group.started
                group.values |= {"reward": event.reward_mean, "tokens": tokens, "latency_s": latency_s}
                continue
            is_filter = isinstance(event, Filter)
            group.cause = f"filtered: {event.reason}" if is_filter else event.reason.partition(":")[0]
            group.values.setdefault("latency_s", event.time - group.started)
            order.append(event.group_id)
    return {group_id: seen[group_id] for group_id in order}, num_ended_at


def _divide(group: EndedGroup, rollouts: Sequence[Rollout]) -> list[EndedGroup]:
    """Return the parts of a trained group: the rollouts that were trained, and by cause those that were masked."""
    parts: dict[str, list[tuple[int, float]]] = {}
    for rollout in rollouts:
        num_tokens = sum(int((sample.masked or sample).loss_mask_T.sum()) for sample in rollout.samples)
        is_masked = bool(rollout.samples) and all(sample.masked is not None for sample in rollout.samples)
        cause = TRAINED if not is_masked else TRUNCATED if rollout.is_truncated else MASKED
        parts.setdefault(cause, []).append((num_tokens, rollout.reward))
    means = {
        cause: dict(zip(("tokens", "reward"), np.mean(found, axis=0).tolist(), strict=True)) for cause, found in parts.items()
    }
    return [
        replace(group, cause=cause, share=len(found) / len(rollouts), values=group.values | means[cause])
        for cause, found in parts.items()
    ]


def add_difficulty(groups: Sequence[EndedGroup]) -> None:
    """Set the difficulty: minus the mean reward of the example's other groups, so that it does not depend on the group itself."""
    rewards: dict[tuple[str, int], dict[int, float]] = {}
    for group in groups:
        if "reward" in group.values:
            rewards.setdefault((group.env, group.example_id), {})[group.group_id] = group.values["reward"]
    for group in groups:
        known = rewards.get((group.env, group.example_id), {})
        if others := known.keys() - {group.group_id}:
            group.values["difficulty"] = -sum(known[other] for other in others) / len(others)


def measure_selection(groups: Sequence[EndedGroup]) -> SelectionReport:
    """Return the bias of each quantity with its causes."""
    counts: dict[str, float] = {}
    for group in groups:
        counts[group.cause] = counts.get(group.cause, 0.0) + group.share
    known = {name: [group for group in groups if name in group.values] for name in _FAVOURED}
    num_groups = len({group.group_id for group in groups})
    biases = [
        _measure(of_name, name, num_groups=num_groups)
        for name, of_name in known.items()
        if any(group.cause == TRAINED for group in of_name)
    ]
    warnings = [warning for bias in biases if (warning := _warn(known[bias.quantity], bias))]
    return SelectionReport(num_groups=counts, biases=biases, warnings=warnings)


def _measure(groups: Sequence[EndedGroup], quantity: str, *, num_groups: int) -> QuantityBias:
    """Return the bias of `quantity`, which is known of all `groups`."""
    causes = list(dict.fromkeys([TRAINED, *(group.cause for group in groups)]))
    rows = {group_id: row for row, group_id in enumerate(dict.fromkeys(group.group_id for group in groups))}
    weights_UC, sums_UC = np.zeros((len(rows), len(causes))), np.zeros((len(rows), len(causes)))
    for group in groups:
        place = rows[group.group_id], causes.index(group.cause)
        weights_UC[place] = group.share
        sums_UC[place] = group.share * group.values[quantity]

    def effects(counts_U: np.ndarray) -> np.ndarray:
        """Return the effect of each cause, and at the end their sum, [C + 1]. NaN for a draw without a trained group."""
        weights_C, sums_C = counts_U @ weights_UC, counts_U @ sums_UC
        trained_mean = sums_C[0] / weights_C[0] if weights_C[0] else np.nan
        effects_C = (weights_C * trained_mean - sums_C) / weights_C.sum()
        effects_C[0] = 0.0
        return np.append(effects_C, effects_C.sum())

    found = effects(np.ones(len(rows), dtype=int))
    intervals = [(low, high) for low, high in find_interval(len(rows), effects).T.tolist()]
    totals_C = weights_UC.sum(axis=0)
    means_C = sums_UC.sum(axis=0) / totals_C
    return QuantityBias(
        quantity=quantity,
        num_unknown=num_groups - len(rows),
        sampled_mean=float(sums_UC.sum() / totals_C.sum()),
        trained_mean=float(means_C[0]),
        bias=float(found[-1]),
        interval=intervals[-1],
        causes=[
            CauseEffect(
                cause=cause,
                num_groups=float(totals_C[c]),
                mean=float(means_C[c]),
                effect=float(found[c]),
                interval=intervals[c],
            )
            for c, cause in enumerate(causes)
        ],
    )


def _warn(groups: Sequence[EndedGroup], bias: QuantityBias) -> str:
    """Return the warning about a bias; empty if there is none."""
    sign, favoured = _FAVOURED[bias.quantity]
    low, high = bias.interval
    spread = float(np.std([group.values[bias.quantity] for group in groups]))
    if sign * bias.bias <= _SMALLEST_BIAS * spread or low <= 0 <= high:
        return ""
    main = max(bias.causes, key=lambda cause: sign * cause.effect)
    return (
        f"dropping favours {favoured} rollouts: {bias.quantity} is {bias.trained_mean:.4g} over what was trained and "
        f"{bias.sampled_mean:.4g} over what was sampled ({bias.bias:+.3g}, 95 % interval {low:+.3g} to {high:+.3g}), "
        f"mostly by the cause {main.cause!r}"
    )
