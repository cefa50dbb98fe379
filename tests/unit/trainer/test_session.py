"""A session publishes policies, saves checkpoints, removes what nobody needs and reports steps."""

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trivet.checkpoints.commit import (
    ORCHESTRATOR,
    PARTS,
    TRAINER,
    begin_part,
    commit,
    committed_steps,
    finish_part,
    verify_checkpoint,
)
from trivet.config.layout import RunLayout
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import CheckpointError, DiskFull, WeightsError
from trivet.storage.durable import FileRecord
from trivet.trainer import session as module
from trivet.trainer.checkpoint import shard_file
from trivet.trainer.checkpoint.shard_file import write_direct
from trivet.trainer.checkpoint.state import TrainerProgress, load_part
from trivet.trainer.disk_budget import Sizes
from trivet.trainer.measurement.fake import fake_rows
from trivet.trainer.ranks.world import gather_tensor
from trivet.trainer.session import Session
from trivet.trainer.step import Learner, StepResult, train_step
from trivet.weights.catalog import published_versions
from trivet.weights.publish import publish
from trivet.weights.retention import acknowledge
from trivet.wire.events import Commit, Publish, Retire
from trivet.wire.versions import PolicyVersion, Step

RESULT = StepResult(
    loss=0.5,
    grad_norm=2.0,
    lr=0.1,
    values={"ratio": np.array([1.0, 3.0])},
    num_computed_tokens=12,
    flops=1e6,
    forward_backward_s=0.2,
    optimizer_s=0.1,
    logprobs=[],
)


class FakeExporter:
    def __init__(self, order: list[str]) -> None:
        self.order = order
        self.may_write = threading.Event()
        self.files = ["model.safetensors"]

    def gather(self, *, keep: bool) -> dict[str, torch.Tensor]:
        self.order.append("gather")
        return {"weight": torch.ones(64)} if keep else {}

    def write(self, directory: Path, weights: dict[str, torch.Tensor]) -> None:
        assert self.may_write.wait(30)
        self.order.append("write")
        for name in self.files:
            (directory / name).write_bytes(weights["weight"].numpy().tobytes())


@pytest.fixture
def make_session(world, telemetry, tmp_path: Path) -> Iterator[Callable[..., Session]]:
    made: list[Session] = []

    def make(*, learner: Learner | None = None, rank: int = 0, step: int = 0, options: dict | None = None, **keys: object):
        order: list[str] = []
        optimizer = SimpleNamespace(zero_grad=lambda set_to_none: order.append("release"))
        session = Session(
            config=TrainerConfig.model_validate({"output_dir": tmp_path, **keys}),
            layout=RunLayout(tmp_path),
            learner=learner or SimpleNamespace(world=replace(world, rank=rank), optimizer=optimizer),
            progress=TrainerProgress(step=step, total_tokens=100, total_samples=7),
            telemetry=telemetry if rank == 0 else None,
            exporter=FakeExporter(order),
            profiler=SimpleNamespace(finish_step=lambda step: None, close=lambda: None),
            sizes=Sizes(checkpoint=1, weights=4),
            **{"from_step": Step(0), "keep_recent": 1, **(options or {})},
        )
        made.append(session)
        return session

    yield make
    for session in made:
        session.exporter.may_write.set()
        session.close()


def await_policy(session: Session) -> None:
    session.exporter.may_write.set()
    session.await_policy()


def test_a_policy_can_be_read_once_it_was_waited_for(make_session) -> None:
    session = make_session()
    session.publish(Step(3))
    assert published_versions(session.layout) == []
    await_policy(session)
    assert published_versions(session.layout) == [3]
    (event,) = session.telemetry.events
    assert isinstance(event, Publish)
    assert event.version == 3


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("releases", [True, False])
def test_every_rank_releases_its_memory_before_anybody_can_read_the_policy(
    make_session, rank: int, releases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(rank=rank, release_gpu_memory=releases)
    order = session.exporter.order
    monkeypatch.setattr(module, "barrier", lambda world: order.append("barrier"))
    session.exporter.may_write.set()
    session.publish(Step(3))
    session.await_policy()
    assert order == ["gather", *["release", "barrier"] * releases, *["write"] * (rank == 0), "barrier"]


def test_a_policy_that_could_not_be_written_is_raised_by_the_wait_and_not_published(make_session) -> None:
    session = make_session()
    session.exporter.files = []
    session.publish(Step(3))
    with pytest.raises(WeightsError, match="nothing was written to publish"):
        await_policy(session)
    assert published_versions(session.layout) == []
    assert session.telemetry.events == []


def test_without_room_on_the_disk_nothing_is_begun(make_session, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session()
    whole = shutil.disk_usage(session.layout.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: whole._replace(free=0))
    with pytest.raises(DiskFull, match="policy 3"):
        session.publish(Step(3))
    with pytest.raises(DiskFull, match="the trainer's part of checkpoint 1"):
        session.save(Step(1), parts=(TRAINER,))
    assert session.policy_writer.running is session.checkpoint_writer.running is session.newest_checkpoint is None


@pytest.fixture
def six_policies(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    for version in range(1, 7):
        write = lambda directory: (directory / "weights").write_bytes(b"w")  # noqa: E731
        publish(layout, version=PolicyVersion(version), run_id="run", write=write)
    return layout


@pytest.mark.parametrize(
    ("options", "keys", "committed", "acknowledged", "step", "expected"),
    [
        pytest.param({}, {}, None, None, 6, [1, 2, 3, 4], id="the newest stay"),
        pytest.param({"keep_recent": 3}, {}, None, None, 6, [1, 2], id="servers that lag by design"),
        pytest.param({}, {}, None, 3, 6, [1, 2], id="everything from the oldest reader on stays"),
        pytest.param({"from_step": 1, "newest_checkpoint": 4}, {}, 2, None, 6, [3], id="checkpoints, begun ones included"),
        pytest.param({"keep_recent": 2}, {"deterministic": True}, 4, None, 6, [1], id="what a resume samples from"),
        pytest.param({"reference_interval": 2, "keep_recent": 0}, {}, 3, None, 5, [1, 5], id="references"),
        pytest.param({}, {"ckpt": {"weights": {"interval": 2}}}, None, None, 6, [1, 3], id="the user's interval"),
    ],
)
def test_policies_that_nobody_needs(
    make_session, six_policies: RunLayout, options, keys, committed, acknowledged, step, expected
) -> None:
    if committed is not None:
        (begin_part(six_policies, Step(committed), TRAINER) / "state").write_text("x")
        finish_part(six_policies, Step(committed), TRAINER)
        commit(six_policies, Step(committed), parts=(TRAINER,))
    if acknowledged is not None:
        acknowledge(six_policies, "server", PolicyVersion(acknowledged))
    assert make_session(options=options, step=step, **keys).find_unneeded() == expected


def test_what_nobody_needs_is_removed_and_recorded(make_session, six_policies: RunLayout, telemetry) -> None:
    make_session(step=6).settle()
    assert published_versions(six_policies) == [5, 6]
    assert telemetry.events == [Retire(version=PolicyVersion(version)) for version in (1, 2, 3, 4)]


@pytest.fixture
def session(make_session, make_learner, tiny_model: Path) -> Session:
    return make_session(learner=make_learner(tiny_model, lr=1e-2), ckpt={"keep_last": 2})


def save(session: Session, step: int, *, parts: tuple[str, ...] = (TRAINER,), policy: Future[None] | None = None) -> None:
    session.progress.step = step
    session.policy_writer.running = policy
    session.save(Step(step), parts=parts)
    session.policy_writer.running = None


def test_both_parts_are_committed_together_after_they_are_written_and_recorded(session: Session) -> None:
    (begin_part(session.layout, Step(1), ORCHESTRATOR) / "state").write_text("x")
    finish_part(session.layout, Step(1), ORCHESTRATOR)
    save(session, 1, parts=PARTS)
    assert session.newest_checkpoint == 1
    session.checkpoint_writer.wait()
    verify_checkpoint(session.layout, Step(1))
    (event,) = session.telemetry.events
    assert isinstance(event, Commit)
    assert event.step == 1


def test_without_the_other_part_nothing_is_committed(session: Session) -> None:
    save(session, 1, parts=PARTS)
    with pytest.raises(CheckpointError, match="lacks the part of the orchestrator"):
        session.checkpoint_writer.wait()
    assert committed_steps(session.layout) == []


def test_a_commit_waits_for_the_policy_of_its_step_and_fails_with_it(session: Session) -> None:
    written, failed = Future[None](), Future[None]()
    save(session, 1, policy=written)
    session.raise_failure()  # nothing to report yet, and it does not wait
    assert committed_steps(session.layout) == []
    written.set_result(None)
    session.checkpoint_writer.wait()
    failed.set_exception(WeightsError("no policy"))
    save(session, 2, policy=failed)
    with pytest.raises(WeightsError, match="no policy"):
        session.checkpoint_writer.wait()
    assert committed_steps(session.layout) == [1]


def test_old_checkpoints_go_after_a_commit(session: Session) -> None:
    for step in (1, 2, 3):
        save(session, step)
    session.checkpoint_writer.wait()
    assert committed_steps(session.layout) == [2, 3]


def test_a_checkpoint_has_the_state_of_its_own_step_whatever_the_learner_does_meanwhile(
    session: Session, tiny_model: Path, make_learner, oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()

    def write_late(path: Path, content: torch.Tensor) -> FileRecord:
        assert may_write.wait(30)
        return write_direct(path, content)

    def train(learner: Learner, step: int) -> list[torch.Tensor]:
        train_step(learner, [oracle.make_row(oracle.make_examples(count=4, vocab_size=100, seed=step))], step=step)
        return [gather_tensor(parameter).detach().clone() for parameter in learner.model.parameters()]

    monkeypatch.setattr(shard_file, "write_direct", write_late)
    learner, expected = session.learner, {}
    for step in (1, 2):
        may_write.clear()
        expected[step] = train(learner, step)
        save(session, step)
        after = train(learner, step + 1)
        session.raise_failure()
        assert step not in committed_steps(session.layout)
        may_write.set()
        session.checkpoint_writer.wait()
    resumed = learner
    for step, parameters in expected.items():
        resumed = make_learner(tiny_model, lr=1e-2)
        assert load_part(session.layout.checkpoint_step(step) / TRAINER, resumed).step == step
        found = [gather_tensor(parameter) for parameter in resumed.model.parameters()]
        assert all(map(torch.equal, found, parameters))
    assert all(map(torch.equal, train(resumed, 3), after)), "the optimizer's state is that of the step, too"


@pytest.mark.parametrize("is_async", [True, False])
def test_a_failed_write_is_raised_once_and_nothing_is_committed(
    make_session, make_learner, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr(shard_file, "write_direct", fail)
    session = make_session(learner=make_learner(tiny_model), ckpt={"async_write": is_async})
    if is_async:
        save(session, 1)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        session.checkpoint_writer.wait() if is_async else save(session, 1)
    session.raise_failure()
    assert committed_steps(session.layout) == []


def test_a_report_has_the_steps_values_times_totals_and_each_write_that_ended_in_the_step(make_session) -> None:
    session = make_session()

    def report(step: int, **extra: float) -> dict[str, float]:
        with session.timed("step"), session.timed("wait_for_batch"):
            pass
        session.report(Step(step), RESULT, fake_rows(step, seed=0, seq_len=8, vocab_size=10), extra=extra)
        reported, metrics = session.telemetry.steps[-1]
        assert reported == step
        return metrics

    metrics = report(1, **{"data/epoch": 1})
    assert metrics["ratio/mean"] == 2.0
    assert metrics["loss/mean"] == 0.5
    assert (metrics["progress/total_tokens"], metrics["progress/total_samples"]) == (100, 7)
    assert {"time/step", "time/wait_for_batch", "perf/throughput"} <= metrics.keys()
    assert metrics["data/epoch"] == 1
    assert metrics["perf/computed_tokens"] == 12
    assert session.times == {}, "the next step starts at 0"
    assert "time/write_weights" not in metrics
    session.policy_writer.start(lambda: None)
    session.policy_writer.wait()
    assert {"time/write_weights", "time/write_weights_cpu"} <= report(2).keys()
    assert "time/write_weights" not in report(3)


def test_a_report_has_the_figures_of_each_delta_once(make_session) -> None:
    session = make_session(weights={"delta": True, "transport": "http"})

    def report(step: int) -> int:
        with session.timed("step"):
            pass
        session.report(Step(step), RESULT, fake_rows(step, seed=0, seq_len=8, vocab_size=10))
        return len({"weights/delta_bytes", "time/write_delta"} & session.telemetry.steps[-1][1].keys())

    for step, expected in [(1, 0), (2, 2)]:  # the first policy of a session has no delta
        session.publish(Step(step))
        await_policy(session)
        assert report(step) == expected
    assert report(3) == 0
    assert not make_session()._deltas
