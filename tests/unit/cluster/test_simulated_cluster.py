"""Recovery over many machines in virtual time: what a loss costs the run, by what was lost."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.simulated_cluster import SimulatedCluster
from support.simulated_training import DRIVER, ClusterPlan
from trivet.cluster import fence
from trivet.config.layout import RunLayout

pytestmark = pytest.mark.slow

PLAN = ClusterPlan(
    num_train_nodes=3,
    min_train_nodes=2,
    num_servers=20,
    servers_per_machine=2,
    num_env_nodes=4,
    batch_s=40.0,
    end_s=3600.0,
)
LEADER, TRAINER, SERVER, POOL = 0, 2, 4, 14
"""Machines: that of rank 0 with the orchestrator, one with other ranks, one that serves, one with environment workers."""


def simulate(plan: ClusterPlan, directory: Path) -> SimulatedCluster:
    cluster = SimulatedCluster(plan, layout=RunLayout(directory / "run"))
    cluster.run()
    spent_s = sum(cluster.training.spent_s.values())
    assert spent_s == pytest.approx(cluster.timeline.now), "every second is accounted for"
    return cluster


def test_a_run_that_loses_nothing_trains_from_its_start_on(tmp_path: Path) -> None:
    cluster = simulate(PLAN, tmp_path)
    assert cluster.training.kept_s == 60 * ((3600 - 8 - 180 - 40) // 60)
    assert cluster.training.attempt == 1


def test_a_lost_machine_that_serves_or_has_environments_costs_the_trainer_nothing(tmp_path: Path) -> None:
    calm = simulate(PLAN, tmp_path / "calm")
    cluster = simulate(replace(PLAN, losses=[(1000.0, SERVER), (2000.0, SERVER + 1), (2500.0, POOL)]), tmp_path)
    assert cluster.training.kept_s == calm.training.kept_s
    assert cluster.training.attempt == 1
    assert [name for name, *_ in cluster.training.downs] == [
        *("inference-2", "inference-3", "inference-4", "inference-5"),
        "env-workers-24",
    ]
    (_, down_at, up_at), *_, (_, pool_down_at, pool_up_at) = cluster.training.downs
    # Another machine is there after 90 s, and its actor 8 s later; then the role starts.
    assert (down_at, pool_down_at) == (1000, 2500)
    assert 1000 + 98 + 180 <= up_at <= 1000 + 98 + 180 + 15
    assert 2500 + 98 + 20 <= pool_up_at <= 2500 + 98 + 20 + 15


def test_every_lost_machine_that_trains_takes_the_run_back_to_its_commit_on_the_others(tmp_path: Path) -> None:
    leader, other = (
        simulate(replace(PLAN, losses=[(1000.0, machine)]), tmp_path / str(machine)) for machine in (LEADER, TRAINER)
    )
    training = other.training
    assert (training.attempt, other.ends) == (2, [])
    assert "attempt 2 from step 12" in other.log_text.getvalue()
    assert training.spent_s["notice a loss"] == pytest.approx(30, abs=1)
    assert training.spent_s["stop, and wait for a node"] == pytest.approx(5, abs=2)
    assert 0 < training.spent_s["steps taken back"] <= 2 * 60 + 10
    assert training.step < simulate(PLAN, tmp_path / "calm").training.step
    assert leader.training.spent_s == training.spent_s


def test_a_run_that_needs_all_its_nodes_waits_for_the_lost_one(tmp_path: Path) -> None:
    cluster = simulate(replace(PLAN, losses=[(1000.0, TRAINER)], min_train_nodes=None), tmp_path)
    assert cluster.training.attempt == 2
    assert cluster.training.spent_s["stop, and wait for a node"] == pytest.approx(98 - 30, abs=15)


def test_an_actor_that_ended_is_replaced_without_waiting_until_its_node_counts_as_lost(tmp_path: Path) -> None:
    cluster = simulate(replace(PLAN, actors_ended=[(1000.0, TRAINER)], min_train_nodes=None), tmp_path)
    assert (cluster.training.attempt, cluster.ends, cluster.training.downs) == (2, [], [])
    assert cluster.training.spent_s["notice a loss"] <= 1
    assert cluster.training.spent_s["stop, and wait for a node"] == pytest.approx(8, abs=3)


@pytest.mark.parametrize("cut_s", [45.0, 600.0])
def test_a_machine_that_is_cut_off_ends_its_ranks_before_others_replace_them(tmp_path: Path, cut_s: float) -> None:
    plan = replace(PLAN, cuts=[(1000.0, TRAINER, cut_s), (2000.0, SERVER, cut_s)])
    cluster = simulate(plan, tmp_path)  # `Training.started` asserts that nothing runs twice
    assert (cluster.training.attempt, cluster.ends) == (2, [])
    assert cluster.training.spent_s["notice a loss"] == pytest.approx(30 - 15, abs=1)


def test_without_the_fence_a_machine_that_is_cut_off_runs_beside_its_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "_ALONE_SHARE", 100.0)
    with pytest.raises(AssertionError, match="ranks of two attempts run"):
        simulate(replace(PLAN, cuts=[(1000.0, TRAINER, 600.0)]), tmp_path)


def test_a_run_that_loses_its_driver_is_queued_again_and_goes_on_from_its_commit(tmp_path: Path) -> None:
    cluster = simulate(replace(PLAN, losses=[(1000.0, DRIVER)]), tmp_path)
    assert (cluster.ends, cluster.training.attempt) == (["driver lost"], 2)
    assert cluster.training.step > 30


def test_ten_losses_within_the_window_of_restarts_do_not_end_a_run(tmp_path: Path) -> None:
    losses = [(600.0 + 200 * number, 1 + number % 2) for number in range(10)]  # four within its 600 s
    cluster = simulate(replace(PLAN, losses=losses, train_s=30.0), tmp_path)
    assert (cluster.ends, cluster.training.attempt) == ([], 11)


def test_the_same_plan_has_the_same_history(tmp_path: Path) -> None:
    plan = replace(PLAN, losses=[(700.0, SERVER), (1300.0, TRAINER), (2100.0, DRIVER)])
    first, second = simulate(plan, tmp_path / "1"), simulate(plan, tmp_path / "2")
    assert first.training.spent_s == second.training.spent_s
    assert first.log_text.getvalue().replace(str(tmp_path / "1"), "") == second.log_text.getvalue().replace(
        str(tmp_path / "2"), ""
    )


LARGE = replace(
    PLAN,
    num_train_nodes=32,
    min_train_nodes=28,
    num_servers=125,
    servers_per_machine=1,
    num_env_nodes=64,
    batch_s=54.0,  # the servers have a tenth in reserve
    end_s=12 * 3600.0,
)


@pytest.mark.parametrize(("num_machines", "least_share"), [(32 + 125 + 64, 0.92), (32 + 125, 0.92), (32, 0.68)])
def test_a_machine_lost_every_ten_minutes_leaves_most_of_the_time(
    tmp_path: Path, num_machines: int, least_share: float
) -> None:
    losses = list(draw_losses(num_machines, every_s=600.0, end_s=LARGE.end_s))
    cluster = simulate(replace(LARGE, losses=losses), tmp_path)
    share = cluster.training.kept_s / cluster.timeline.now
    num_train = sum(machine < 32 for _, machine in losses)
    print(f"{len(losses)} losses, {num_train} of them train: {share:.1%} of 12 h trained, ends {cluster.ends}")
    assert share >= least_share


def draw_losses(num_machines: int, *, every_s: float, end_s: float) -> Iterator[tuple[float, int]]:
    """Yield times at random, and machines that follow multiples of the golden ratio: each kind is hit as often as it is there."""
    rng, at, number = random.Random(18), 0.0, 0
    while (at := at + rng.expovariate(1 / every_s)) < end_s:
        number += 1
        yield at, int(number * (5**0.5 - 1) / 2 % 1 * num_machines)
