"""What the configuration allows the dispatcher to start."""

from dataclasses import replace

import pytest

from trivet.orchestrator.dispatch_limits import Limits
from trivet.wire.versions import PolicyVersion, Step

LIMITS = Limits(rollouts_per_example=4, rollouts_per_step=8, max_rollouts_in_flight=8, max_async_level=1, seq_len=64)


@pytest.mark.parametrize(
    ("step", "version", "ahead", "may"),
    [
        (2, 0, 0, True),
        (2, 0, 4, True),
        (2, 0, 8, False),  # it would go into batch 3, which needs policy 1
        (2, 1, 8, True),
        (3, 0, 0, False),
    ],
)
def test_a_rollout_starts_only_from_a_policy_young_enough_for_its_batch(step: int, version: int, ahead: int, may: bool):
    assert LIMITS.may_dispatch(step=Step(step), version=PolicyVersion(version), rollouts_ahead=ahead) is may


def test_without_a_limit_per_minute_there_is_no_bucket():
    assert LIMITS.make_bucket(0.0) is None


@pytest.mark.parametrize(("per_minute", "burst"), [(12, 4), (240, 20)])
def test_a_bucket_starts_with_five_seconds_of_rollouts_and_at_least_one_group(per_minute: int, burst: int):
    bucket = replace(LIMITS, tasks_per_minute=per_minute).make_bucket(100.0)
    assert bucket is not None
    assert bucket.wait_s(burst, now=100.0) == 0.0
    bucket.take(burst)
    assert bucket.wait_s(4, now=100.0) == pytest.approx(4 * 60 / per_minute)
