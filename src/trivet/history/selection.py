"""Compares what a run sampled with what it trained: the bias of dropping and filtering. For `trivet selection` and the page.

A group ends trained, filtered, stale or failed; single rollouts of a trained group may be masked. For a quantity x with mean m_t
over what was trained and m over all that was sampled, the bias is m_t - m. With the share p_c and the mean m_c of a cause c,
m_t - m is the sum of p_c (m_t - m_c) over the causes: what each cause adds to the bias. Intervals are those of the bootstrap over
groups.

Legend: B draws, U groups, C causes; the first cause is TRAINED.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from trivet.algorithms.resampling import draw_statistics, find_interval
from trivet.config.layout import RunLayout
from trivet.errors import ConfigError, MessageRefused
from trivet.history.record import read_lines
from trivet.history.run_history import ORCHESTRATOR
from trivet.transport.recording import GROUPS_FILE, unpack_groups
from trivet.wire.events import AnyEvent, BatchFormed, Dispatch, Drop, Filter, Finish, Start

TRAINED, MASKED, TRUNCATED = "trained", "masked", "truncated"
QUANTITIES = ("tokens", "reward", "difficulty", "latency_s")
_SMALLEST_BIAS = 0.05
"""Least bias that is warned of, in standard deviations over groups: a smaller one hardly changes what is learnt."""


class CauseEffect(msgspec.Struct, frozen=True, kw_only=True):
    """The change of the mean of a quantity by one cause."""

    cause: str
    num_groups: float
    """Groups that ended so and whose quantity is known; a rollout counts as its share of a group."""
    mean: float
    """Mean over these groups."""
    effect: float | None
    """What the cause adds to the bias; None for TRAINED. The effects of all causes add up to the bias."""
    interval: tuple[float, float] | None = None
    """95 % interval of the effect."""


class QuantityBias(msgspec.Struct, frozen=True, kw_only=True):
    """The bias in one quantity."""

    quantity: str
    num_unknown: int
    """Groups of which the quantity is unknown. They are left out."""
    sampled_mean: float
    trained_mean: float
    bias: float
    interval: tuple[float, float] | None
    causes: list[CauseEffect]


class SelectionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The object that `--json` prints."""

    num_groups: dict[str, int]
    """Ended groups by cause. A group that was trained in part counts as trained."""
    biases: list[QuantityBias]
    warnings: list[str]
    notes: list[str]
    """What is not known, and why."""


@dataclass(slots=True, kw_only=True)
class EndedGroup:
    """A group from its dispatch to its end."""

    env: str
    example_id: int
    started: float
    """Time of its last dispatch, Unix seconds."""
    cause: str = ""
    values: dict[str, float] = field(default_factory=dict[str, float])
    """The quantities that are known, by name."""
    masked: dict[str, tuple[float, dict[str, float]]] = field(default_factory=dict[str, tuple[float, dict[str, float]]])
    """For a trained group, by cause: the share of its rollouts that were masked, and their quantities."""


def read_ended_groups(layout: RunLayout) -> list[EndedGroup]:
    """Return the groups that ended, without those that a resume voided, with the lengths of trained rollouts from their files.

    Raises:
        ConfigError: the directory has no history of groups.
        HistoryError: a line of events.jsonl is not an event.
    """
    if not layout.events.exists():
        raise ConfigError(f"{str(layout.root)!r} holds no {layout.events.name}: no run wrote there; give the output_dir of one")
    ended, steps = follow_groups(line.event for line in read_lines(layout.events))
    if not ended:
        raise ConfigError(f"{layout.events} has no group that ended; give a run of rl that has trained a step")
    for step in steps:
        _add_rollouts(layout, step, ended)
    _add_difficulty(list(ended.values()))
    return list(ended.values())


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
            seen[event.group_id] = EndedGroup(env=event.env, example_id=event.example_id, started=event.time)
        elif isinstance(event, BatchFormed):
            ids = [group_id for group_id in event.group_ids if group_id in seen]
            for group_id in ids:
                seen[group_id].cause = TRAINED
            order += ids
            num_ended_at[event.step] = len(order)
        elif isinstance(event, Finish | Filter | Drop) and (group := seen.get(event.group_id)) is not None:
            if isinstance(event, Finish):
                group.values |= {"reward": event.reward_mean, "latency_s": event.time - group.started}
                if event.completion_tokens is not None:
                    group.values["tokens"] = event.completion_tokens
                continue
            is_filter = isinstance(event, Filter)
            group.cause = f"filtered: {event.reason}" if is_filter else event.reason.partition(":")[0]
            group.values.setdefault("latency_s", event.time - group.started)
            order.append(event.group_id)
    return {group_id: seen[group_id] for group_id in order}, num_ended_at


def _add_rollouts(layout: RunLayout, step: int, ended: dict[int, EndedGroup]) -> None:
    """Add what the recorded rollouts of a step say about its groups: lengths, and rollouts that were masked."""
    try:
        recorded = unpack_groups((layout.rollouts_step(step) / GROUPS_FILE).read_bytes())
    except (OSError, MessageRefused):
        return
    for group in recorded.groups:
        found = ended.get(group.group_id)
        if found is None or not group.rollouts:
            continue
        parts: dict[str, list[tuple[float, float]]] = {}
        for rollout in group.rollouts:
            num_tokens = sum(int((sample.masked or sample).loss_mask_T.sum()) for sample in rollout.samples)
            is_masked = bool(rollout.samples) and all(sample.masked is not None for sample in rollout.samples)
            cause = TRAINED if not is_masked else TRUNCATED if rollout.is_truncated else MASKED
            parts.setdefault(cause, []).append((float(num_tokens), rollout.reward))
        latency = {name: value for name, value in found.values.items() if name == "latency_s"}
        for cause, rollouts in parts.items():
            tokens, reward = np.mean(rollouts, axis=0).tolist()
            values = {**latency, "tokens": tokens, "reward": reward}
            if cause == TRAINED:
                found.values = values
            else:
                found.masked[cause] = (len(rollouts) / len(group.rollouts), values)


def _add_difficulty(groups: Sequence[EndedGroup]) -> None:
    """Set the difficulty: minus the mean reward of the example's other groups, so that it does not depend on the group itself."""
    rewards: dict[tuple[str, int], list[float]] = {}
    for group in groups:
        if "reward" in group.values:
            rewards.setdefault((group.env, group.example_id), []).append(group.values["reward"])
    for group in groups:
        known = rewards.get((group.env, group.example_id), [])
        own = group.values.get("reward")
        num_others = len(known) - (own is not None)
        if num_others:
            difficulty = -(sum(known) - (own or 0.0)) / num_others
            for values in (group.values, *(values for _, values in group.masked.values())):
                values["difficulty"] = difficulty


def measure_selection(groups: Sequence[EndedGroup]) -> SelectionReport:
    """Return the bias of each quantity with its causes."""
    counts: dict[str, int] = {}
    for group in groups:
        counts[group.cause] = counts.get(group.cause, 0) + 1
    biases = [bias for name in QUANTITIES if (bias := _measure(groups, name)) is not None]
    notes = [
        f"{bias.quantity} of {bias.num_unknown:,} groups is unknown: they are left out there"
        for bias in biases
        if bias.num_unknown
    ]
    measured = {bias.quantity for bias in biases}
    notes += [f"{name} cannot be compared: {_WHY_UNKNOWN[name]}" for name in QUANTITIES if name not in measured]
    return SelectionReport(num_groups=counts, biases=biases, warnings=_warn(groups, biases), notes=notes)


_WHY_UNKNOWN = {
    "tokens": "no trained group has its rollouts on disk",
    "reward": "no trained group has a reward",
    "difficulty": "no example was sampled twice",
    "latency_s": "no trained group has a time",
}


def _measure(groups: Sequence[EndedGroup], quantity: str) -> QuantityBias | None:
    """Return the bias of `quantity`; None if it is known of no trained group."""
    names = dict.fromkeys([TRAINED, *(name for group in groups for name in (group.cause, *group.masked))])
    columns = {name: column for column, name in enumerate(names)}
    weights_UC, sums_UC = np.zeros((len(groups), len(names))), np.zeros((len(groups), len(names)))
    for row, group in enumerate(groups):
        rest = 1.0 - sum(share for share, _ in group.masked.values())
        for cause, share, values in [
            (group.cause, rest, group.values),
            *((name, share, values) for name, (share, values) in group.masked.items()),
        ]:
            if quantity in values:
                weights_UC[row, columns[cause]] = share
                sums_UC[row, columns[cause]] = share * values[quantity]
    is_known_U = weights_UC.any(axis=1)
    weights_UC, sums_UC = weights_UC[is_known_U], sums_UC[is_known_U]
    totals_C = weights_UC.sum(axis=0)
    if not totals_C[0]:
        return None

    def effects(counts_BU: np.ndarray) -> np.ndarray:
        """Return the effect of each cause [B, C], and zero for TRAINED."""
        weights_BC, sums_BC = counts_BU @ weights_UC, counts_BU @ sums_UC
        with np.errstate(divide="ignore", invalid="ignore"):
            trained_B1 = sums_BC[:, :1] / weights_BC[:, :1]
            return (weights_BC * trained_B1 - sums_BC) / weights_BC.sum(axis=1, keepdims=True)

    (effects_C,) = effects(np.ones((1, len(weights_UC))))
    draws_BC = draw_statistics(len(weights_UC), effects)
    with np.errstate(invalid="ignore"):
        means_C = sums_UC.sum(axis=0) / totals_C  # NaN for a cause without a known value, which is left out
    return QuantityBias(
        quantity=quantity,
        num_unknown=int((~is_known_U).sum()),
        sampled_mean=float(sums_UC.sum() / totals_C.sum()),
        trained_mean=float(means_C[0]),
        bias=float(effects_C.sum()),
        interval=find_interval(draws_BC.sum(axis=1)),
        causes=[
            CauseEffect(
                cause=name,
                num_groups=float(totals_C[c]),
                mean=float(means_C[c]),
                effect=None if c == 0 else float(effects_C[c]),
                interval=None if c == 0 else find_interval(draws_BC[:, c]),
            )
            for name, c in columns.items()
            if totals_C[c]
        ],
    )


_FAVOURED = {"tokens": (-1, "short"), "reward": (1, "easy"), "difficulty": (-1, "easy")}
"""By quantity, the sign of a bias that is warned of, and what it favours."""


def _warn(groups: Sequence[EndedGroup], biases: Sequence[QuantityBias]) -> list[str]:
    warnings: list[str] = []
    for bias in biases:
        sign, favoured = _FAVOURED.get(bias.quantity, (0, ""))
        spread = float(np.std([group.values[bias.quantity] for group in groups if bias.quantity in group.values]))
        if not sign or bias.interval is None or sign * bias.bias < _SMALLEST_BIAS * spread or not spread:
            continue
        low, high = bias.interval
        if low > 0 or high < 0:
            main = max(
                (cause for cause in bias.causes if cause.effect is not None), key=lambda cause: sign * (cause.effect or 0.0)
            )
            warnings.append(
                f"dropping favours {favoured} rollouts: {bias.quantity} is {bias.trained_mean:.4g} over what was trained and "
                f"{bias.sampled_mean:.4g} over what was sampled ({bias.bias:+.3g}, 95 % interval {low:+.3g} to {high:+.3g}), "
                f"mostly by the cause {main.cause!r}"
            )
    return warnings
