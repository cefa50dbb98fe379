"""Play random schedules of crashes, time-outs, lost workers, slow groups, loads and pins. The history checker judges them."""

import asyncio
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.simulated_run import Plan, SimulatedRun, publish_policies
from support.virtual_time import run_virtually
from trivet.config.layout import RunLayout
from trivet.history.record import Outline
from trivet.history.run_history import RunHistory
from trivet.orchestrator.policy import READER
from trivet.weights.catalog import published_versions
from trivet.weights.retention import LiveReaders, retirable
from trivet.wire.events import BatchFormed, ServerDown

LIMIT_S = 20_000.0
"""In virtual time. A run that takes longer hangs."""


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    return publish_policies(tmp_path_factory.mktemp("published"), count=8)


def simulate(plan: Plan, published: Path) -> SimulatedRun:
    async def play(directory: Path) -> SimulatedRun:
        run = SimulatedRun(plan, directory=directory, published=published)
        await run.run()
        return run

    with tempfile.TemporaryDirectory() as directory:
        return run_virtually(play(Path(directory) / "run"), limit_s=LIMIT_S)


def judge(run: SimulatedRun) -> RunHistory:
    """Check that the history keeps its invariants, and that its live groups are those of the last checkpoint."""
    outline = Outline(start_steps=frozenset({0}), has_orchestrator=True)
    history = RunHistory(outline, max_off_policy_steps=run.plan.max_off_policy_steps)
    for line, event in enumerate(run.events, start=1):
        history.read(event, line=line)  # type: ignore[arg-type]  # every event that is written is of the union
    assert history.ledger.breaches == []
    batches = [event for event in run.events if isinstance(event, BatchFormed)]
    assert [batch.step for batch in batches] == list(range(1, run.plan.max_steps + 1))
    pending = run.loop.buffer.snapshot(also_in_flight=run.loop.dispatcher.undispatched_draws)
    assert history.groups.state.pending.in_flight == {draw.group_id for draw in pending.in_flight}
    assert history.groups.state.pending.ready == {group.group_id for group in pending.ready}
    return history


shares = st.sampled_from([0.0, 0.1, 0.4])
plans = st.builds(
    Plan,
    seed=st.integers(0, 2**32),
    num_servers=st.integers(1, 3),
    max_async_level=st.integers(0, 3),
    is_strict=st.booleans(),
    max_off_policy_steps=st.integers(3, 8),
    oversampling_factor=st.sampled_from([1.0, 1.5, 3.0]),
    crash_every_s=st.sampled_from([None, 5.0, 30.0, 120.0]),
    freeze_every_s=st.sampled_from([None, 20.0, 100.0]),
    failed_share=shares,
    lost_share=shares,
    slow_share=shares,
    pin_every_s=st.sampled_from([None, 5.0, 40.0]),
    train_s=st.sampled_from([0.2, 3.0, 20.0]),
)


@pytest.mark.parametrize("num_hanging", [1, 2])
def test_a_server_that_hangs_keeps_no_policy_on_the_disk(num_hanging: int, published: Path, tmp_path: Path) -> None:
    """Only the orchestrator acknowledges. When it can load no policy, it soon sends no batch, so none is published."""
    plan, layout = Plan(seed=1, num_servers=2, max_steps=8), RunLayout(tmp_path / "run")

    async def play() -> None:
        run = SimulatedRun(plan, directory=layout.root, published=published)
        for server in list(run.servers.values())[:num_hanging]:
            asyncio.get_running_loop().call_later(8.0, setattr, server, "is_frozen", True)
        with pytest.raises(ExceptionGroup, match="unhandled") if num_hanging == plan.num_servers else nullcontext():
            await run.run()

    run_virtually(play(), limit_s=LIMIT_S)
    policies, readers = published_versions(layout), LiveReaders(layout).versions()
    assert [*readers] == [READER]
    level = plan.max_async_level
    unneeded = retirable(policies, latest=policies[-1], keep_recent=level, in_use=readers.values(), kept=[])
    assert len(policies) - len(unneeded) <= level + 2
    assert (policies[-1] >= plan.max_steps - 1) == (num_hanging < plan.num_servers)


@settings(max_examples=15, deadline=None)
@given(plan=plans)
def test_no_schedule_loses_or_doubles_a_group_or_breaks_a_version(plan, published):
    judge(simulate(plan, published))


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(plan=plans)
def test_no_schedule_of_thousands_loses_or_doubles_a_group_or_breaks_a_version(plan, published):
    judge(simulate(plan, published))


def test_a_run_whose_only_server_crashes_goes_on_under_the_same_ids(published):
    run = simulate(Plan(seed=5, crash_every_s=8.0, max_steps=6), published)
    history = judge(run)
    assert any(isinstance(event, ServerDown) for event in run.events)
    assert history.groups.state.tried_again > 0


def test_groups_of_lost_workers_are_dispatched_again(published):
    run = simulate(Plan(seed=6, lost_share=0.5), published)
    history = judge(run)
    assert history.groups.state.tried_again > 0
    assert set(history.groups.state.dropped) <= {"failed"}


def test_the_same_seed_gives_the_same_history(published):
    plan = Plan(seed=11, num_servers=2, crash_every_s=20.0, lost_share=0.2, failed_share=0.1, slow_share=0.1)
    first, second = simulate(plan, published), simulate(plan, published)
    assert first.events == second.events


@pytest.mark.parametrize(("train_s", "group_s"), [(30.0, 10.0), (10.0, 30.0)])
def test_steps_take_the_longer_of_training_and_generating_at_async_level_one_and_the_sum_at_zero(train_s, group_s, published):
    assert step_s(published, level=1, train_s=train_s, group_s=group_s) <= 1.1 * max(train_s, group_s)
    assert step_s(published, level=0, train_s=train_s, group_s=group_s) >= train_s + group_s


def step_s(published: Path, *, level: int, train_s: float, group_s: float) -> float:
    """Return the mean time between batches once the run has settled."""
    plan = Plan(seed=3, max_async_level=level, train_s=train_s, group_s=group_s, max_steps=8, is_even=True, poll_factor=1.0)
    formed = [event.time for event in simulate(plan, published).events if isinstance(event, BatchFormed)]
    return (formed[-1] - formed[2]) / (len(formed) - 3)
