"""Decides when a rollout may start: how old its policy may be, how many may be in flight, and how many may start per minute.

Called by the orchestrator's dispatcher and buffer. Step n trains policy n-1 on batch n. The staleness of a sample in batch n is
n - 1 - (its oldest version), so it grows while the sample waits. Callers pass the time: nothing here reads a clock.
"""

from dataclasses import dataclass

from trivet.wire.versions import PolicyVersion, Step

_PREEMPTION_FACTOR = 0.9
"""Factor of what fits after a server has preempted a sequence, that is, has thrown it out of its cache. In the simulation of
`test_concurrency_simulation` 0.8 leaves caches half empty at times, and 1.0 preempts twice as often."""
_QUEUE_FACTOR = 0.9
"""Factor of the limit while a queue is too long, which wastes no work. The value is a judgement, not a measurement; at 1.0 the
queue would stay, and at 0.8 it would be treated like a preemption."""
_ALLOWED_QUEUE_SHARE = 0.25
"""Waiting requests, as a share of running ones, that are no reason for a cut: they replace requests that end. At 0 servers would
have idle capacity."""
_GROWTH_SHARE = 0.1
"""Growth of the limit in one interval, as a share of itself: it doubles in eight intervals."""
_FULL_CACHE = 0.9
"""Used share of a KV cache from which a server gets no further rollouts: those it has grow into the rest. In the simulation 0.95
preempts twice to four times as often, for 1 % more throughput."""
_BINDING_SHARE = 0.9
"""The limit grows only if at least this share of it is in flight. It is below 1.0 because whole groups start, so the limit may
never be reached exactly."""


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
        is_strict: serve exactly `required_version`, so that a run does not depend on timing.
    """
    required = required_version(step=step, max_async_level=max_async_level)
    return required if is_strict else PolicyVersion(max(required, latest))


def may_dispatch(
    *, step: Step, version: PolicyVersion, rollouts_ahead: int, rollouts_per_step: int, max_async_level: int
) -> bool:
    """Return whether a new group may start now.

    It may start if `version` is recent enough for the batch that will train on it, `step + rollouts_ahead // rollouts_per_step`.
    This also limits how many rollouts wait in the buffer. With `max_async_level` 0 and no oversampling, every rollout is sampled
    from the policy that is trained on it. Oversampled rollouts wait for the next batch, when the policy is one version newer.

    Args:
        step: the batch being filled.
        version: the policy that the servers serve.
        rollouts_ahead: rollouts that started before and are in no batch yet: in flight, or finished.
        rollouts_per_step: floor(batch_size * oversampling_factor).
    """
    expected_step = Step(step + rollouts_ahead // rollouts_per_step)
    return version >= required_version(step=expected_step, max_async_level=max_async_level)


def has_capacity(*, num_running: int, num_waiting: int, kv_usage: float) -> bool:
    """Return whether a server can compute more sequences: its KV cache has free space, and its queue is short."""
    return kv_usage < _FULL_CACHE and num_waiting <= int(num_running * _ALLOWED_QUEUE_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedLoad:
    """The load of all servers together."""

    num_running: int
    """Sequences that are being computed now."""
    num_waiting: int
    """Requests that wait now, because a server has no capacity for them."""
    num_preempted: int
    """Sequences that were thrown out of a cache, to be computed again, since the load was last read."""
    has_capacity: bool
    """True when at least one server can compute more sequences."""


def next_limit(limit: int, load: CombinedLoad, *, in_flight: int, floor: int, ceiling: int) -> int:
    """Return the new limit of rollouts in flight.

    A preempted sequence is computed twice. So after preemptions, if no server has capacity, the limit is cut below the rollouts
    that do not wait. If more requests wait than run, rollouts become older without any of them being faster, so the limit is cut
    less. That cut only shortens the queue, and keeps the allowed part of it. While a server has capacity and nearly as many
    rollouts as the limit are in flight, the limit grows.

    Args:
        limit: the limit so far.
        in_flight: rollouts in flight. Some of them call a tool or are scored, and are in no server's load.
        floor: lowest limit, at most `ceiling`.
        ceiling: highest limit.
    """
    allowed_queue = int(load.num_running * _ALLOWED_QUEUE_SHARE)
    num_not_waiting = in_flight - load.num_waiting
    if load.num_preempted and not load.has_capacity:
        new_limit = min(limit, int(num_not_waiting * _PREEMPTION_FACTOR))
    elif load.num_waiting > load.num_running:
        new_limit = max(int(limit * _QUEUE_FACTOR), min(limit, num_not_waiting + allowed_queue))
    elif load.has_capacity and in_flight >= limit * _BINDING_SHARE:
        new_limit = limit + max(1, int(limit * _GROWTH_SHARE))
    else:
        new_limit = limit
    return max(floor, min(new_limit, ceiling))


class TokenBucket:
    """Limits how many rollouts start per minute. A few seconds' worth of them may start at once. Times are in seconds."""

    def __init__(self, *, per_minute: float, burst: float, now: float) -> None:
        """Start with a full bucket.

        Args:
            burst: most rollouts that may start at once, also at the beginning; at least the rollouts of one group.
            now: the time by the caller's clock.
        """
        self._per_s = per_minute / 60.0
        self._burst = burst
        self._available = burst
        self._updated_at = now

    def wait_s(self, num_rollouts: int, *, now: float) -> float:
        """Return the seconds until `num_rollouts` may start; 0 when they may start now."""
        self._available = min(self._burst, self._available + (now - self._updated_at) * self._per_s)
        self._updated_at = now
        return max(0.0, (num_rollouts - self._available) / self._per_s)

    def take(self, num_rollouts: int) -> None:
        """Count `num_rollouts` as started."""
        self._available -= num_rollouts
