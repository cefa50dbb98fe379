"""Recover by role with real roles, the real vLLM and the tiny model. The run goes on whatever is killed or stopped."""

import signal
from collections.abc import Callable

import msgspec
import psutil
import pytest

from support.histories import assert_proven
from support.processes import assert_all_gone, assert_named_in_time, assert_port_free, descendants_of, wait_until
from support.rl_run import Run
from trivet.config.layout import COMMITTED, STABLE, RunLayout
from trivet.history.check import check_run
from trivet.telemetry.events import read_events
from trivet.wire.events import Restart
from trivet.wire.status import RunState, RunStatus

pytestmark = pytest.mark.vllm

MAX_STEPS = 48
"""A step takes a tenth of a second on an idle machine. Some steps must be left at every interruption."""
WATCHDOG_S = 20.0
BACK_WITHIN_S = 900.0


def status_of(layout: RunLayout) -> RunStatus:
    return msgspec.json.decode(layout.status.read_bytes(), type=RunStatus)


def wait_for_restart(run: Run, number: int) -> RunStatus:
    """Wait until the run has made progress after its restart `number`."""
    process = run.process
    assert process is not None

    def is_back() -> bool:
        assert process.poll() is None, run.output[-4000:]
        restarts = status_of(run.layout).restarts
        return len(restarts) >= number and restarts[number - 1].down_s is not None

    wait_until(is_back, timeout_s=BACK_WITHIN_S, waiting_for=f"restart {number}: {run.output[-4000:]}")
    return status_of(run.layout)


def test_a_run_completes_although_each_role_is_lost_once(make_run: Callable[..., Run]) -> None:
    run = make_run(max_steps=MAX_STEPS)
    launcher = run.start("--recovery.watchdog-timeout-s", str(WATCHDOG_S), "--recovery.max-restarts", "5")
    run.wait_for(run.layout.weights_step(2) / STABLE)

    trainer = run.role("trainer")
    run.role("inference").kill()
    first = wait_for_restart(run, 1)
    assert first.restarts[0].roles == ["inference"]
    assert trainer.is_running()

    run.wait_for(run.layout.checkpoint_step(6) / COMMITTED)
    inference = run.role("inference")
    run.role("trainer").kill()
    second = wait_for_restart(run, 2)
    from_step = second.restarts[1].from_step
    assert from_step is not None
    assert from_step >= 6
    assert from_step % 6 == 0
    assert second.attempt == 2

    run.role("orchestrator").send_signal(signal.SIGSTOP)
    wait_until(lambda: "orchestrator stuck: " in run.output, timeout_s=WATCHDOG_S + 120, waiting_for="the watchdog")
    assert_named_in_time(run.output, "orchestrator", timeout_s=WATCHDOG_S)
    family = descendants_of(launcher.pid)

    assert run.await_exit(BACK_WITHIN_S) == 0, run.output[-4000:]
    assert_all_gone(family)
    assert not inference.is_running() or inference.status() == psutil.STATUS_ZOMBIE
    assert [restart.roles for restart in restarts_of(run.layout)] == [
        ["inference"],
        ["orchestrator", "trainer"],
        ["orchestrator", "trainer"],
    ]
    assert run.output.count("started inference") == 2
    assert "restarts: 3" in run.output
    ended = status_of(run.layout)
    assert (ended.state, ended.exit_code, ended.last_commit) == (RunState.DONE, 0, MAX_STEPS)
    assert_proven(check_run(run.layout))


def test_a_killed_launcher_takes_every_role_with_it(make_run: Callable[..., Run]) -> None:
    run = make_run(max_steps=MAX_STEPS)
    launcher = run.start()
    run.wait_for(run.layout.weights_step(1) / STABLE)
    family = descendants_of(launcher.pid)
    port = int(run.output.split("inference ready url=http://127.0.0.1:")[1].split("/")[0])
    launcher.kill()
    assert launcher.wait(120) == -signal.SIGKILL
    assert_all_gone(family, timeout_s=60.0)
    assert_port_free(port)


def restarts_of(layout: RunLayout) -> list[Restart]:
    return [event for event in read_events(layout.events) if isinstance(event, Restart)]
