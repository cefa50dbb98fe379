"""Decides when a rollout may start: how old its policy may be, how many may be in flight, and how many may start per minute.

Batch n is trained on policy n-1. Staleness of a sample in batch n is n - 1 - (its oldest version), time in queues included. Nothing
here has a clock of its own.
"""

from dataclasses import dataclass

from trivet.wire.versions import PolicyVersion, Step

_CUT_ON_PREEMPTION = 0.8
"""Share of the limit that is left after a preemption, which wastes work: the cut is twice as deep as the one for a queue. A
judgement, not a measurement; at 1.0 preemptions would continue."""
_CUT_ON_QUEUE = 0.9
"""Share of the limit that is left while a queue is too long, which wastes nothing. A judgement, not a measurement; at 1.0 the queue
would stay, at 0.8 it would cost as much as a preemption."""
_QUEUE_KEPT = 0.25
"""Waiting requests as a share of running ones that are left alone: what ends is replaced at once. At 0 places would stay empty."""
_GROWTH = 0.05
"""Growth as a share of the ceiling: from nothing to the ceiling in twenty intervals. A cut for a queue at the ceiling takes two of
them to grow back."""
_IS_BINDING = 0.9
"""The limit is what holds rollouts back when this share of it is in flight. Below 1.0 because whole groups start: a place for less
than a group stays empty."""


def staleness(*, step: Step, oldest: PolicyVersion) -> int:
    """Return the staleness of a sample in batch `step` whose oldest token is of policy `oldest`, in policy versions."""
    return step - 1 - oldest


def is_stale(*, step: Step, oldest: PolicyVersion, max_off_policy_steps: int) -> bool:
    """Return whether a sample whose oldest token is of policy `oldest` may no longer enter batch `step`."""
    return staleness(step=step, oldest=oldest) > max_off_policy_steps


def required_version(*, step: Step, max_async_level: int) -> PolicyVersion:
    """Return the oldest policy that may start rollouts for batch `step`: step - 1 - max_async_level, at least 0."""
    return PolicyVersion(max(step - 1 - max_async_level, 0))


def target_version(*, step: Step, latest: PolicyVersion, max_async_level: int, is_strict: bool) -> PolicyVersion:
    """Return the policy that the servers should serve while batch `step` is being filled.

    Args:
        latest: newest published policy.
        is_strict: hold exactly `required_version`, so that a run does not depend on timing.
    """
    required = required_version(step=step, max_async_level=max_async_level)
    return required if is_strict else PolicyVersion(max(required, latest))


def may_dispatch(
    *, step: Step, version: PolicyVersion, rollouts_ahead: int, rollouts_per_step: int, max_async_level: int
) -> bool:
    """Return whether a new group may start now.

    A group started behind `rollouts_ahead` others (finished and waiting, or in flight) will land in batch
    `step + rollouts_ahead // rollouts_per_step`; it may start if `version` is recent enough for that batch. This bounds
    what waits in the buffer. With `max_async_level` 0 and no oversampling every rollout is of the policy it trains; what
    oversampling leaves over waits for the next batch, one policy later.

    Args:
        step: the batch being filled.
        version: what the servers hold.
        rollouts_per_step: floor(batch_size * oversampling_factor).
    """
    lands_in = Step(step + rollouts_ahead // rollouts_per_step)
    return version >= required_version(step=lands_in, max_async_level=max_async_level)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSince:
    """The load of all servers together, since they were last asked."""

    num_running: int
    """Sequences being computed now."""
    num_waiting: int
    """Requests without a place now."""
    num_preempted: int
    """Sequences thrown out of a cache, to be computed again."""


def next_limit(limit: int, load: LoadSince, *, in_flight: int, floor: int, ceiling: int) -> int:
    """Return the new limit of rollouts in flight: additive increase, multiplicative decrease.

    Sequences thrown out of the cache are work done twice: a cut. A queue longer than what runs makes rollouts old and none of
    them faster: a softer cut, which takes from the queue only and leaves enough of it that no place stays empty. While the queue
    is short and the limit is what holds rollouts back, it grows.

    Args:
        limit: the limit so far.
        in_flight: rollouts in flight; some of them are in a tool or being scored, and no server knows of those.
        floor: at most `ceiling`.
    """
    kept_queue = int(load.num_running * _QUEUE_KEPT)
    busy = in_flight - load.num_waiting
    if load.num_preempted:
        wanted = int(min(limit, in_flight) * _CUT_ON_PREEMPTION)
    elif load.num_waiting > load.num_running:
        wanted = max(int(limit * _CUT_ON_QUEUE), min(limit, busy + kept_queue))
    elif load.num_waiting <= kept_queue and in_flight >= limit * _IS_BINDING:
        wanted = limit + max(1, int(ceiling * _GROWTH))
    else:
        wanted = limit
    return max(floor, min(wanted, ceiling))


class TokenBucket:
    """Lets so many rollouts start per minute, a few seconds' worth at once."""

    def __init__(self, *, per_minute: float, burst: float, now: float) -> None:
        """Start with a full bucket.

        Args:
            burst: most rollouts that may start at once, and at the very start; at least those of one group.
        """
        self._per_s = per_minute / 60.0
        self._burst = burst
        self._tokens = burst
        self._at = now

    def wait_s(self, num_rollouts: int, *, now: float) -> float:
        """Return the seconds until `num_rollouts` may start; 0 when they may start now."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        return max(0.0, (num_rollouts - self._tokens) / self._per_s)

    def take(self, num_rollouts: int) -> None:
        """Count `num_rollouts` as started."""
        self._tokens -= num_rollouts
