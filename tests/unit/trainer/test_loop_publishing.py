"""Run the RL loop, and check when it publishes policies and what a failed write does."""

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.prepared_batches import PreparedBatches, make_config, run_loop
from support.processes import wait_until
from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.errors import DiskFull, Diverged
from trivet.trainer import loop, session
from trivet.trainer.loop import run
from trivet.trainer.step import Learner, StepResult, train_step
from trivet.weights.catalog import published_versions
from trivet.weights.manifest import Manifest, verify
from trivet.weights.publish import publish
from trivet.wire.batches import MicroBatch
from trivet.wire.versions import PolicyVersion, Step


def let_policies_wait(monkeypatch: pytest.MonkeyPatch, *, step_taken: Callable[[Step, Callable[[], None]], None]) -> None:
    """No policy is written before it is let through.

    Args:
        step_taken: called after each update, before the policy of its step, with what lets one policy through.
    """
    permits = threading.Semaphore(0)

    def wait_and_publish(layout: RunLayout, **given: Any) -> Manifest:
        assert permits.acquire(timeout=30)
        return publish(layout, **given)

    def take_step(learner: Learner, rows: Sequence[MicroBatch], *, step: Step) -> StepResult:
        result = train_step(learner, rows, step=step)
        step_taken(step, permits.release)
        return result

    monkeypatch.setattr(session, "publish", wait_and_publish)
    monkeypatch.setattr(loop, "train_step", take_step)


def test_a_policy_is_written_while_the_next_step_is_taken_which_is_not_in_it(
    tiny_model: Path, world, make_batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, behind = RunLayout(tmp_path / "at_once"), RunLayout(tmp_path / "behind")
    config = make_config(tiny_model, at_once.root, max_steps=3, max_async_level=3, ckpt={"async_write": False})
    run_loop(config, world, lambda: make_batches(at_once, last=3))

    def step_taken(step: Step, let_one: Callable[[], None]) -> None:
        assert published_versions(behind) == list(range(1, step - 1))
        if step > 1:
            let_one()
        if step == 3:
            let_one()  # nothing is trained beside the last

    let_policies_wait(monkeypatch, step_taken=step_taken)
    config = make_config(tiny_model, behind.root, max_steps=3, max_async_level=3)
    run_loop(config, world, lambda: make_batches(behind, last=3))
    digests = [
        [verify(layout.weights_step(version)).digest for version in published_versions(layout)] for layout in (at_once, behind)
    ]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 3


@pytest.mark.parametrize(("max_async_level", "asked"), [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3, 4])])
def test_a_step_whose_policy_could_not_be_written_is_not_committed(
    tiny_model: Path,
    world,
    make_batches,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_async_level: int,
    asked: list[int],
) -> None:
    """The trainer does not wait for the batch that needs the policy either: it would never come."""
    layout = RunLayout(tmp_path)

    def refuse_the_third(layout: RunLayout, *, version: PolicyVersion, **given: Any) -> Manifest:
        if version == 3:
            wait_until(lambda: receiver.asked == asked, timeout_s=60, waiting_for="the loop to ask for what it may")
            raise OSError(errno.ENOSPC, "No space left on device")
        return publish(layout, version=version, **given)

    monkeypatch.setattr(session, "publish", refuse_the_third)
    config, receiver = make_config(tiny_model, tmp_path, max_async_level=max_async_level), PreparedBatches({})

    def make_receiver(_: Step) -> PreparedBatches:
        receiver.batches = make_batches(layout, parts=(2, 3))
        return receiver

    with pytest.raises(DiskFull, match="policy 3"):
        run(config, world, make_receiver=make_receiver)
    assert committed_steps(layout) == [2]
    assert receiver.asked == asked


def test_a_step_that_diverges_names_the_policy_that_is_still_being_written(
    tiny_model: Path, world, make_batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(step: Step, let_one: Callable[[], None]) -> None:
        if step == 2:
            threading.Timer(0.2, let_one).start()
            raise Diverged("the loss of step 2 is nan")

    let_policies_wait(monkeypatch, step_taken=diverge)
    layout = RunLayout(tmp_path)
    with pytest.raises(Diverged, match=r"the last good weights are .*step_1$"):
        run_loop(make_config(tiny_model, tmp_path), world, lambda: make_batches(layout))
