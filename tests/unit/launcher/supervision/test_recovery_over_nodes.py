"""Give recovery histories of nodes that are lost and come back, and check its decisions."""

from support.recovery_history import INFERENCE, History, make_role
from trivet.config.schema.deployment import DeploymentConfig
from trivet.exits import NODE_LOST
from trivet.launcher.plan import TRAINING, RecoveryUnit
from trivet.launcher.supervision.recovery import (
    AnnounceRestart,
    PreemptRun,
    StartUnit,
    StopRoles,
)
from trivet.wire.status import RunState


def over_nodes(*, min_train_nodes: int | None = None, num_servers: int = 1) -> History:
    """Return a run whose trainer is on nodes 0 and 1, and whose servers are on the nodes after these."""
    deployment = DeploymentConfig(
        type="multi_node",
        num_train_nodes=2,
        num_infer_replicas=num_servers,
        min_train_nodes=min_train_nodes,
        return_timeout_s=100,
    )
    history = History(deployment=deployment, backoff_s=1)
    history.roles["inference"] = make_role("inference", unit=INFERENCE, node=2, work="serving")
    history.roles["trainer-1"] = make_role("trainer-1", unit=TRAINING, node=1)
    if num_servers == 2:
        unit = RecoveryUnit("inference-1")
        history.roles["inference-1"] = make_role("inference-1", unit=unit, node=3, work="serving")
    return history


def test_a_lost_node_that_trains_ends_the_attempt_everywhere_and_is_waited_for() -> None:
    history = over_nodes().ends("trainer-1", NODE_LOST, at=10)
    history.lost_nodes = frozenset({1})
    announced, stop = history.at(10)
    assert isinstance(announced, AnnounceRestart)
    assert announced.cause == "trainer-1 lost with its node"
    assert stop == StopRoles(roles=("orchestrator", "trainer"), by_kill=False)
    history.ends("orchestrator", 143, at=11).ends("trainer", 143, at=11)
    assert history.at(11) == []
    assert history.at(60) == []
    history.lost_nodes = frozenset()
    assert history.at(61) == [StartUnit(unit=TRAINING)]


def test_a_run_that_needs_a_node_in_vain_asks_to_be_started_again() -> None:
    history = over_nodes().ends("trainer-1", NODE_LOST, at=10)
    history.lost_nodes = frozenset({1})
    history.at(10)
    history.ends("orchestrator", 143, at=11).ends("trainer", 143, at=11)
    history.at(11)
    assert history.at(12) == []
    verdict = history.verdict(at=112)
    assert (verdict.outcome, verdict.exit_code) == (RunState.FAILED, 75)
    assert "node 1 was lost and did not return within 100 s" in verdict.reason


def test_a_run_that_may_goes_on_at_once_on_the_nodes_that_remain() -> None:
    history = over_nodes(min_train_nodes=1).ends("trainer-1", NODE_LOST, at=10)
    history.lost_nodes = frozenset({1})
    history.at(10)
    history.ends("orchestrator", 143, at=11).ends("trainer", 143, at=11)
    history.at(11)
    assert history.at(12) == [StartUnit(unit=TRAINING)]


def test_the_loss_of_one_server_of_two_is_waited_for_without_end() -> None:
    history = over_nodes(num_servers=2).ends("inference-1", NODE_LOST, at=10)
    history.lost_nodes = frozenset({3})
    (announced,) = history.at(10)
    assert isinstance(announced, AnnounceRestart)
    assert announced.roles == ("inference-1",)
    assert history.at(10.2) == []
    assert history.at(1000) == []
    history.lost_nodes = frozenset()
    assert history.at(1001) == [StartUnit(unit=RecoveryUnit("inference-1"))]


def test_the_loss_of_every_server_ends_the_run_after_a_while() -> None:
    history = over_nodes().ends("inference", NODE_LOST, at=10)
    history.lost_nodes = frozenset({2})
    history.at(10)
    assert history.at(10.2) == []
    assert history.at(12) == []
    assert history.verdict(at=112).exit_code == 75


def test_lost_environment_workers_are_waited_for_while_others_do_their_work() -> None:
    unit = RecoveryUnit("env-workers-2")
    for work, is_replaced in (("environments", True), ("", False)):
        history = over_nodes()
        history.knows("orchestrator", work=work)
        history.roles[unit] = make_role(unit, unit=unit, node=3, work="environments")
        history.ends(unit, NODE_LOST, at=10)
        history.lost_nodes = frozenset({3})
        history.at(10)
        assert history.at(10.2) == []
        assert history.at(12) == []
        if is_replaced:
            assert history.at(1000) == []
        else:
            assert history.verdict(at=1000).exit_code == 75


def test_a_lost_orchestrator_is_nothing_that_training_can_do_without() -> None:
    history = over_nodes(min_train_nodes=1)
    history.knows("orchestrator", node=2)
    history.ends("orchestrator", NODE_LOST, at=10)
    history.lost_nodes = frozenset({2})
    history.at(10)
    history.ends("trainer", 143, at=11).ends("trainer-1", 143, at=11)
    history.at(11)
    assert history.at(12) == []


def test_every_lost_node_that_trains_counts_against_those_that_must_remain() -> None:
    history = over_nodes(min_train_nodes=1)
    history.lost_nodes = frozenset({1})  # lost before: the attempt has no role there
    del history.roles["trainer-1"]
    history.knows("trainer", node=0)
    history.roles["trainer-2"] = make_role("trainer-2", unit=TRAINING, node=0)
    history.ends("trainer-2", NODE_LOST, at=10)
    history.lost_nodes = frozenset({0, 1})
    history.at(10)
    history.ends("trainer", 143, at=11).ends("orchestrator", 143, at=11)
    history.at(11)
    assert history.at(12) == []


def test_a_server_that_restarts_does_not_end_a_run_whose_other_server_was_lost_long_ago() -> None:
    history = over_nodes(num_servers=2).ends("inference-1", NODE_LOST, at=10)
    history.lost_nodes = frozenset({3})
    history.at(10)
    history.at(10.2)
    assert history.at(12) == []
    history.ends("inference", 1, at=3600)
    (announced,) = history.at(3600)
    assert isinstance(announced, AnnounceRestart)
    assert announced.roles == ("inference",)
    assert history.at(3600.2) == []


def test_a_node_that_trains_and_is_asked_to_end_has_the_run_commit_and_be_started_again() -> None:
    history = over_nodes()
    history.leaving_nodes = frozenset({1})
    assert history.at(10) == [PreemptRun(reason="a signal has asked node 1 to end", grace_s=60)]
    history.ends("orchestrator", 0, at=12).ends("trainer", 0, at=12)
    assert history.at(12) == []
    history.ends("trainer-1", 0, at=13)
    history.leaving_nodes, history.lost_nodes = frozenset(), frozenset({1})
    verdict = history.verdict(at=13)
    assert (verdict.outcome, verdict.exit_code) == (RunState.INTERRUPTED, 75)
    assert verdict.reason == "a signal has asked node 1 to end"


def test_a_signal_on_the_first_node_counts_more_than_one_on_another() -> None:
    history = over_nodes()
    history.leaving_nodes = frozenset({1})
    history.at(10)
    history.interrupted_by = 15
    history.at(11)
    for name in ("orchestrator", "trainer", "trainer-1"):
        history.ends(name, 0, at=12)
    assert history.verdict(at=12).exit_code == 143


def test_a_node_without_which_the_run_goes_on_may_end() -> None:
    history = over_nodes(min_train_nodes=1)
    history.leaving_nodes = frozenset({1})
    assert history.at(10) == []
    history = over_nodes()
    history.leaving_nodes = frozenset({2})
    assert history.at(10) == []


def test_a_server_whose_node_is_asked_to_end_ends_if_another_serves_and_starts_again_elsewhere() -> None:
    history = over_nodes(num_servers=2)
    history.leaving_nodes = frozenset({2})
    announced, stopped = history.at(10)
    assert isinstance(announced, AnnounceRestart)
    assert announced.cause == "node 2 is asked to end"
    assert stopped == StopRoles(roles=("inference",), by_kill=False)
    history.ends("inference", 0, at=12)
    assert history.at(12) == []
    assert history.at(100) == []  # its node still goes
    history.leaving_nodes = frozenset()
    assert history.at(200) == [StartUnit(unit=RecoveryUnit("inference"))]


def test_a_failure_before_the_first_step_is_tried_again_as_a_lost_node_may_be_behind_it() -> None:
    history = over_nodes().ends("trainer", 1, at=10, has_progressed=False, last_log_line="connection closed by peer")
    announced, _ = history.at(10)
    assert isinstance(announced, AnnounceRestart)
    history.ends("orchestrator", 143, at=11).ends("trainer-1", 143, at=11)
    history.at(11)
    assert history.at(12) == [StartUnit(unit=TRAINING)]
    history.starts("orchestrator", "trainer")
    history.roles["trainer-1"] = make_role("trainer-1", unit=TRAINING, node=1)
    history.ends("trainer", 1, at=20, has_progressed=False, last_log_line="connection closed by peer")
    assert "in the same way" in history.verdict(at=20).reason


def test_two_losses_of_a_node_before_the_first_step_are_no_mistake_of_the_run() -> None:
    history = over_nodes()
    for at in (10, 40):
        history.ends("trainer-1", NODE_LOST, at=at, has_progressed=False)
        announced, _ = history.at(at)
        assert isinstance(announced, AnnounceRestart)
        history.ends("orchestrator", 143, at=at + 1).ends("trainer", 143, at=at + 1)
        history.at(at + 1)
        assert history.at(at + 10) == [StartUnit(unit=TRAINING)]
        history.starts("orchestrator", "trainer")
        history.roles["trainer-1"] = make_role("trainer-1", unit=TRAINING, node=1)


def test_lost_nodes_that_had_trained_do_not_count_as_restarts_that_end_a_run() -> None:
    history = over_nodes(min_train_nodes=1)
    for number in range(10):
        at = 10 + 20 * number
        for name in ("trainer", "orchestrator"):
            history.knows(name, exit_code=None, has_progressed=True)
        history.knows("trainer-1", exit_code=None, has_progressed=True)
        history.ends("trainer-1", NODE_LOST, at=at)
        announced, *_ = history.at(at)
        assert isinstance(announced, AnnounceRestart)
        assert announced.delay_s == 1
        history.ends("orchestrator", 143, at=at + 1).ends("trainer", 143, at=at + 1)
        history.at(at + 1)
        assert history.at(at + 2) == [StartUnit(unit=TRAINING)]


def test_a_node_that_is_lost_again_and_again_before_its_server_answers_does_not_end_a_run_that_has_others() -> None:
    history = over_nodes(num_servers=2)
    history.knows("inference", has_progressed=True)
    for number in range(10):
        at = 10 + 20 * number
        history.knows("inference-1", exit_code=None, has_progressed=False)
        history.ends("inference-1", NODE_LOST, at=at)
        (announced,) = history.at(at)
        assert isinstance(announced, AnnounceRestart)
        history.at(at + 1)
        assert history.at(at + 2) == [StartUnit(unit=RecoveryUnit("inference-1"))]


def test_a_node_that_is_lost_again_and_again_before_the_only_server_answers_ends_the_run() -> None:
    history = over_nodes()
    for number in range(3):
        at = 10 + 20 * number
        history.knows("inference", exit_code=None, has_progressed=False)
        history.ends("inference", NODE_LOST, at=at)
        history.at(at)
        history.at(at + 1)
        assert history.at(at + 10) == [StartUnit(unit=RecoveryUnit("inference"))]
    history.knows("inference", exit_code=None)
    history.ends("inference", NODE_LOST, at=80)
    assert "after 3 restarts" in history.verdict(at=80).reason


def test_a_role_that_waited_in_vain_for_the_lock_of_a_lost_node_is_started_again() -> None:
    """The file system keeps the lock of a machine that died for a while, however often the role meets it."""
    history = over_nodes()
    for at in (10.0, 200.0):
        history.knows("trainer", exit_code=143, ended_at=at + 1).knows("trainer-1", exit_code=143, ended_at=at + 1)
        (announced,) = history.ends("orchestrator", 75, at=at, has_progressed=False).at(at)
        assert isinstance(announced, AnnounceRestart), announced
        assert history.at(at) == []
        assert history.at(at + 60) == [StartUnit(unit=TRAINING)]
        for name in ("orchestrator", "trainer", "trainer-1"):
            history.knows(name, exit_code=None)
