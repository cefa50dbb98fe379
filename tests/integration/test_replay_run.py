"""Record a run on the real vLLM, then train a new run on its rollouts without an inference server."""

import json
import shutil
from collections.abc import Callable

import pytest

from support.histories import assert_proven
from support.rl_run import Run
from trivet.config.layout import COMMITTED, RunLayout
from trivet.history.check import check_run
from trivet.telemetry.events import read_events
from trivet.wire.events import Load, ServerUp, Stop

pytestmark = pytest.mark.vllm

RECORDED_STEPS = 3


def rows_of(layout: RunLayout) -> list[tuple[str, int, int, float, float]]:
    """Return what each trained rollout was, in order of steps and lines; group ids are a run's own."""
    steps = sorted(layout.rollouts.iterdir(), key=lambda path: int(path.name.removeprefix("step_")))
    rows = [json.loads(line) for path in steps for line in (path / "rollouts.jsonl").read_text().splitlines()]
    return [(row["env"], row["example_id"], row["index"], row["reward"], row["advantage"]) for row in rows]


def test_a_recorded_run_is_replayed_resumed_and_ends_with_its_record(make_run: Callable[..., Run]) -> None:
    recorded, replayed = make_run("recorded", max_steps=RECORDED_STEPS), make_run("replayed", max_steps=2)
    flags = ("--orchestrator.replay", str(recorded.layout.root))

    recorded.start("--orchestrator.record-rollouts", "true")
    assert recorded.await_exit() == 0, recorded.output[-4000:]
    assert_proven(check_run(recorded.layout))
    before = {path: path.stat().st_mtime_ns for path in recorded.layout.root.rglob("*")}

    replayed.start(*flags, "--dry-run")
    assert replayed.await_exit() == 0, replayed.output[-4000:]
    assert "no inference server is started" in replayed.output
    assert not replayed.layout.root.exists()

    replayed.start(*flags)
    assert replayed.await_exit() == 0, replayed.output[-4000:]
    assert (replayed.layout.checkpoint_step(2) / COMMITTED).exists()
    replayed.start(*flags, "--ckpt.resume-step", "-1", "--max-steps", "9")
    assert replayed.await_exit() == 0, replayed.output[-4000:]
    assert "is used up after 12 groups" in replayed.output

    report = assert_proven(check_run(replayed.layout))
    assert (report.last_step, sorted(report.commits)) == (RECORDED_STEPS, [2, RECORDED_STEPS])
    assert rows_of(replayed.layout) == rows_of(recorded.layout)
    events = list(read_events(replayed.layout.events))
    assert not [event for event in events if isinstance(event, Load | ServerUp)]
    assert [event.reason for event in events if isinstance(event, Stop)] == ["done", "done", "exhausted", "exhausted"]
    assert not (replayed.layout.configs / "inference.toml").exists()
    assert before == {path: path.stat().st_mtime_ns for path in recorded.layout.root.rglob("*")}

    (recorded.layout.rollouts_step(2) / "groups.msgpack.z").unlink()
    shutil.rmtree(replayed.layout.root)
    replayed.start(*flags)
    assert replayed.await_exit() == 2
    assert "orchestrator.record_rollouts = true" in replayed.output
