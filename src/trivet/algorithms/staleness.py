"""Measures how far behind the learner a token was sampled, and decides when to load which policy.

Batch n is trained on policy n-1. Staleness of a sample in batch n is n - 1 - (its oldest version), time in queues included.
"""

from trivet.wire.versions import PolicyVersion, Step


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
