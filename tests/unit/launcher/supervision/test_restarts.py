"""The restarts of a run, summed up."""

from trivet.exits import describe_restart
from trivet.launcher.supervision.restarts import recount
from trivet.wire.status import RestartRecord
from trivet.wire.versions import Step

TRAINING = RestartRecord(
    time=0, roles=["orchestrator", "trainer"], cause="trainer killed by SIGKILL", from_step=Step(6), lost_steps=1, down_s=14
)
INFERENCE = RestartRecord(time=1, roles=["inference"], cause="inference killed by SIGKILL")


def test_restarts_are_recounted_in_order_with_their_sum() -> None:
    head, first, second = recount([TRAINING, INFERENCE])
    assert head == "restarts: 2, 14 s without progress, 1 steps taken again"
    assert first.endswith(describe_restart(TRAINING))
    assert second.endswith(describe_restart(INFERENCE))
    assert list(recount([])) == []
