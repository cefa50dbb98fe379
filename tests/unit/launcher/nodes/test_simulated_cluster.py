"""Recovery over many nodes in virtual time: what a loss costs the run, by what was lost and by how it is recovered from."""

from dataclasses import replace
from pathlib import Path

import pytest

from support.simulated_cluster import SimulatedCluster
from support.simulated_training import ClusterPlan
from trivet.config.layout import RunLayout

PLAN = ClusterPlan(
    num_train_nodes=3,
    num_servers=20,
    servers_per_node=2,
    gpus_per_node=8,
    min_train_nodes=2,
    losses=(),
    end_s=3600.0,
    return_s=90.0,
    requeue_s=150.0,
    server_start_s=180.0,
    trainer_start_s=90.0,
    orchestrator_start_s=30.0,
    term_s=5.0,
    batch_s=40.0,
    train_s=60.0,
    commit_every=2,
    commit_s=10.0,
)
HEAD, TRAINER, SERVER = 0, 2, 4
"""A node of each kind."""


def simulate(plan: ClusterPlan, directory: Path) -> SimulatedCluster:
    cluster = SimulatedCluster(plan, layout=RunLayout(directory / "run"))
    cluster.run()
    spent_s = sum(cluster.training.spent_s.values())
    assert spent_s == pytest.approx(cluster.timeline.now), "every second is accounted for"
    return cluster


def test_a_run_that_loses_nothing_trains_from_its_start_on(tmp_path: Path) -> None:
    cluster = simulate(PLAN, tmp_path)
    assert cluster.training.kept_s == 60 * ((3600 - 180 - 40) // 60)
    assert cluster.training.attempt == 1


def test_a_lost_node_that_serves_costs_the_trainer_nothing(tmp_path: Path) -> None:
    calm = simulate(PLAN, tmp_path / "calm")
    cluster = simulate(replace(PLAN, losses=[(1000.0, SERVER), (2000.0, SERVER + 1)]), tmp_path)
    assert cluster.training.kept_s == calm.training.kept_s
    assert cluster.training.attempt == 1
    (name, down_at, up_at), *others = cluster.training.server_downs
    assert (name, down_at, len(others)) == ("inference-2", 1000.0, 3)
    # The node returns after 90 s and holds its ports a moment later; then the server starts.
    assert 1000 + 90 + 180 <= up_at <= 1000 + 90 + 180 + 15


def test_a_lost_node_that_trains_takes_the_run_back_to_its_commit_on_the_others(tmp_path: Path) -> None:
    cluster = simulate(replace(PLAN, losses=[(1000.0, TRAINER)]), tmp_path)
    training = cluster.training
    assert (training.attempt, cluster.ends.head_lost, cluster.ends.codes) == (2, 0, {})
    assert "attempt 2 from step 12" in cluster.log_text.getvalue()
    assert training.spent_s["notice a loss"] == pytest.approx(30, abs=1)
    assert training.spent_s["stop, and wait for a node"] == pytest.approx(5, abs=2)
    assert 0 < training.spent_s["steps taken back"] <= 2 * 60 + 10
    assert training.step < simulate(PLAN, tmp_path / "calm").training.step


def test_a_run_that_needs_all_its_nodes_waits_for_the_lost_one(tmp_path: Path) -> None:
    cluster = simulate(replace(PLAN, losses=[(1000.0, TRAINER)], min_train_nodes=None), tmp_path)
    assert cluster.training.attempt == 2
    assert cluster.training.spent_s["stop, and wait for a node"] == pytest.approx(90 - 30, abs=15)


def test_a_run_that_loses_its_head_is_queued_again_and_goes_on_from_its_commit(tmp_path: Path) -> None:
    cluster = simulate(replace(PLAN, losses=[(1000.0, HEAD)]), tmp_path)
    assert cluster.ends.head_lost == 1
    assert cluster.training.attempt == 2
    assert cluster.training.step > 30


def test_ten_losses_within_the_window_of_restarts_do_not_end_a_run(tmp_path: Path) -> None:
    losses = [(600.0 + 200 * number, 1 + number % 2) for number in range(10)]  # four within its 600 s
    cluster = simulate(replace(PLAN, losses=losses, train_s=30.0), tmp_path)
    assert cluster.ends.reasons == []
    assert cluster.training.attempt == 11


def test_restarting_everything_trains_less_under_the_same_losses(tmp_path: Path) -> None:
    losses = [(800.0, SERVER), (1500.0, TRAINER), (2500.0, SERVER)]
    by_role = simulate(replace(PLAN, losses=losses), tmp_path / "by_role").training
    all_at_once = simulate(replace(PLAN, losses=losses, restarts_all=True), tmp_path / "all").training
    assert all_at_once.attempt == 4
    assert by_role.kept_s - all_at_once.kept_s > 2 * 180  # a start of the servers for each loss of one


def test_the_same_plan_has_the_same_history(tmp_path: Path) -> None:
    plan = replace(PLAN, losses=[(700.0, SERVER), (1300.0, TRAINER), (2100.0, HEAD)])
    first, second = simulate(plan, tmp_path / "1"), simulate(plan, tmp_path / "2")
    assert first.training.spent_s == second.training.spent_s
    assert first.log_text.getvalue().replace(str(tmp_path / "1"), "") == second.log_text.getvalue().replace(
        str(tmp_path / "2"), ""
    )
