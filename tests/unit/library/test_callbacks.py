"""Callbacks hear of steps, evaluations, checkpoints and the end, and one may end the run."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from trivet.config.layout import COMMITTED, RunLayout
from trivet.errors import ConfigError
from trivet.evaluation.scores import Summary
from trivet.library.callbacks import Callbacks, StopRun
from trivet.library.run import RunStep


class Recorder:
    """Records what it hears, and answers evaluations with `answer`."""

    def __init__(self, answer: object = None) -> None:
        self.heard: list[Any] = []
        self._answer = answer

    def on_evaluation(self, summary: Summary) -> object:
        self.heard.append((summary.env, summary.avg))
        return self._answer

    def on_save(self, directory: Path) -> None:
        self.heard.append(directory.name)

    def on_end(self, run: object) -> None:
        self.heard.append(run)


def evaluate(layout: RunLayout, step: int) -> None:
    values = dict.fromkeys(("num_examples", "rollouts_per_example", "num_failed", "completion_tokens"), 1)
    measured = dict.fromkeys(("ci95", "pass_at_k", "truncated"), None)
    directory = layout.evals_step(step, "e")
    directory.mkdir(parents=True)
    summary = Summary(env="e", step=step, digest="", avg=step / 10, seconds=1.0, **values, **measured)
    (directory / "summary.json").write_bytes(msgspec.json.encode(summary))


def commit(layout: RunLayout, step: int) -> None:
    layout.checkpoint_step(step).mkdir(parents=True)
    (layout.checkpoint_step(step) / COMMITTED).touch()


def test_each_evaluation_and_checkpoint_is_told_once(tmp_path: Path) -> None:
    layout, recorder = RunLayout(tmp_path), Recorder()
    callbacks = Callbacks([recorder], layout, since=0.0)
    assert not callbacks.results()
    evaluate(layout, 1)
    commit(layout, 1)
    assert not callbacks.results()
    assert not callbacks.results()
    evaluate(layout, 2)
    callbacks.results()
    callbacks.end("the run")
    assert recorder.heard == [("e", 0.1), "step_1", ("e", 0.2), "the run"]


def test_what_an_earlier_start_wrote_is_not_told(tmp_path: Path) -> None:
    layout, recorder = RunLayout(tmp_path), Recorder()
    evaluate(layout, 1)
    commit(layout, 1)
    Callbacks([recorder], layout, since=10.0**12).results()
    assert recorder.heard == []


@pytest.mark.parametrize("answer", [StopRun, StopRun()])
def test_a_callback_that_returns_stop_asks_for_the_end(tmp_path: Path, answer: object) -> None:
    layout, heard = RunLayout(tmp_path), list[int]()
    step = RunStep(3, {}, tmp_path)
    callbacks = Callbacks([lambda step: answer, lambda step: heard.append(step.number), Recorder()], layout, since=0.0)
    assert callbacks.step(step)
    assert heard == [3]  # all are called
    evaluate(layout, 1)
    assert Callbacks([Recorder(answer)], layout, since=0.0).results()
    assert not Callbacks([lambda step: None], layout, since=0.0).step(step)


def test_an_object_without_a_method_for_callbacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a function or have one of the methods on_step, on_evaluation"):
        Callbacks([3], RunLayout(tmp_path), since=0.0)
