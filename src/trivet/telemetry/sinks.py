"""Passes a role's metrics to the trackers that are configured, each in a thread of its own. `Telemetry` and `eval` open them.

A tracker must never stop or slow a run. So a step only puts its metrics into a queue. An error of a tracker is logged once, and
metrics that it does not take in time are dropped. `metrics/` of the output directory always has everything.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Protocol

from trivet.config.schema.shared import RunIdentity, TrackingConfig, WandbConfig
from trivet.errors import ConfigError
from trivet.wire.rollouts import Rollout

logger = logging.getLogger(__name__)

_MAX_QUEUED = 256
"""Steps that may wait for a tracker. Rollouts wait too, and have some MB a step, so the queue is bounded."""
_OPEN_TIMEOUT_S = 15.0
"""Time that a run waits at its start for a tracker to answer, so that a missing login is an error before anything is trained."""
_CLOSE_TIMEOUT_S = 30.0
"""Time that a run waits at its end for a tracker to take the last steps, seconds."""


class Sink(Protocol):
    """Writes metrics to one tracker. One thread makes all calls."""

    def write(self, step: int, values: Mapping[str, float], *, time: float) -> None:
        """Write the metrics of a step, or of an evaluated policy.

        Args:
            values: finite numbers by name, `trainer/loss/mean` or `eval/<env>/avg@2`.
            time: when they were measured, Unix seconds.
        """

    def write_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write some rollouts of a step. Trackers that show numbers alone do nothing."""

    def close(self) -> None:
        """Deliver what is left, and end this role's part of the tracker's run."""


class SinkFeed:
    """Calls one sink in a thread."""

    def __init__(self, name: str, open_sink: Callable[[], Sink], *, role: str, is_first_attempt: bool) -> None:
        """Open the sink.

        Args:
            name: the section that configures the sink, for messages.
            is_first_attempt: False if the run goes on after an end. Then a tracker that refuses to start does not stop it.

        Raises:
            ConfigError: the tracker refused to start, for example without a login.
        """
        self._name, self._role = name, role
        self._calls: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(_MAX_QUEUED)
        self._opened = Future[None]()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, args=(open_sink,), name=f"tracker-{name}", daemon=True)
        self._thread.start()
        try:
            self._opened.result(_OPEN_TIMEOUT_S)
        except TimeoutError:
            logger.warning("[%s] did not start within %.0f s; the run goes on meanwhile", name, _OPEN_TIMEOUT_S)
            self._opened.add_done_callback(self._warn_if_refused)
        except ConfigError:
            if is_first_attempt:
                raise
            self._warn_if_refused(self._opened)

    def write_step(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step's metrics. The role precedes each name, because several roles have metrics such as `time/step`."""
        self._write(step, {f"{self._role}/{name}": value for name, value in values.items()})

    def write_eval(self, version: int, values: Mapping[str, float]) -> None:
        """Write the scores of an evaluation under their own names, `eval/<env>/…`, without the role."""
        self._write(version, values)

    def write_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write some rollouts of a step."""
        self._put(lambda sink: sink.write_rollouts(step, rollouts))

    def close(self) -> None:
        """Wait until the tracker has everything, at most `_CLOSE_TIMEOUT_S`. May be called again."""
        self._put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._warn(f"it did not take the last steps within {_CLOSE_TIMEOUT_S:.0f} s")

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        numbers = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        now = time.time()
        self._put(lambda sink: sink.write(step, numbers, time=now))

    def _put(self, call: Callable[[Sink], None] | None) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._warn(f"it is {_MAX_QUEUED} steps behind")

    def _run(self, open_sink: Callable[[], Sink]) -> None:
        """Open the sink, and make the calls in their order until None follows."""
        try:
            sink = open_sink()
        except ConfigError as exc:
            self._opened.set_exception(exc)
            return
        except Exception as exc:  # noqa: BLE001 - libraries raise errors of any class, and the run needs none of them
            self._opened.set_exception(ConfigError(f"[{self._name}] cannot start: {type(exc).__name__}: {exc}"))
            return
        self._opened.set_result(None)
        while (call := self._calls.get()) is not None:
            self._try(partial(call, sink))
        self._try(sink.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as exc:  # noqa: BLE001 - as above
            self._warn(f"{type(exc).__name__}: {exc}")

    def _warn_if_refused(self, opened: "Future[None]") -> None:
        if (error := opened.exception()) is not None:
            self._warn(str(error))

    def _warn(self, reason: str) -> None:
        if not self._has_failed:
            logger.warning(
                "[%s] misses metrics, metrics/ has them: %s; the run goes on without further warnings", self._name, reason
            )
        self._has_failed = True


def open_sinks(
    *, wandb: WandbConfig | None, tracking: TrackingConfig, role: str, run: RunIdentity, output_dir: Path, resume_step: int = 0
) -> list[SinkFeed]:
    """Open the trackers that are configured. Their modules are imported here, because some imports take a second.

    Raises:
        ConfigError: a tracker refused to start in the first attempt of a run.
    """
    opened: dict[str, Callable[[], Sink]] = {}
    if wandb is not None:
        from trivet.telemetry.wandb_sink import WandbSink

        opened["wandb"] = partial(WandbSink, wandb, role=role, run_id=run.id, output_dir=output_dir)
    if tracking.opentelemetry is not None:
        from trivet.telemetry.opentelemetry_sink import OpenTelemetrySink

        opened["tracking.opentelemetry"] = partial(OpenTelemetrySink, tracking.opentelemetry, role=role, run_id=run.id)
    if tracking.tensorboard is not None or tracking.trackio is not None or tracking.mlflow is not None:
        from trivet.telemetry.tracker_sinks import MlflowSink, TensorBoardSink, TrackioSink

        if tracking.tensorboard is not None:
            opened["tracking.tensorboard"] = partial(
                TensorBoardSink, tracking.tensorboard, directory=output_dir / "tensorboard" / role, resume_step=resume_step
            )
        if tracking.trackio is not None:
            opened["tracking.trackio"] = partial(TrackioSink, tracking.trackio, role=role, run_id=run.id)
        if tracking.mlflow is not None:
            opened["tracking.mlflow"] = partial(MlflowSink, tracking.mlflow, role=role, run_id=run.id, output_dir=output_dir)
    return [SinkFeed(name, sink, role=role, is_first_attempt=run.attempt == 1) for name, sink in opened.items()]
