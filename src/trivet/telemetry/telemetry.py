"""Writes all outputs of a role about its work: step lines, metrics, events and trackers. A role's loop has one `Telemetry`."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import httpx

from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.shared import SteppingRoleConfig
from trivet.config.schema.trainer import TrainingConfig
from trivet.errors import Diverged
from trivet.process.proxies import PROXY_ERRORS
from trivet.telemetry.console import eval_line, sample_lines, step_line
from trivet.telemetry.detectors import Detector, make_detectors
from trivet.telemetry.events import EventWriter
from trivet.telemetry.logs import SUCCESS
from trivet.telemetry.metrics import MetricsWriter
from trivet.telemetry.sinks import open_sinks
from trivet.wire.events import Event
from trivet.wire.rollouts import Rollout

logger = logging.getLogger(__name__)

_HEARTBEAT_TIMEOUT_S = 10.0
"""Longest time for one call, in seconds. `Heartbeat.close` waits at most this long for a call that is under way."""


class Telemetry:
    """Writes each step, evaluation and event to the outputs that are configured."""

    def __init__(
        self,
        role: Literal["trainer", "orchestrator", "sft"],
        config: SteppingRoleConfig,
        *,
        resume_step: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the role's outputs.

        Args:
            resume_step: lines of metrics of later steps are removed.
            check: called before each event and line of metrics; raises when this role must not write any more.

        Raises:
            ConfigError: the port of the metrics server is in use, or a tracker refused to start.
        """
        layout, run = RunLayout(config.output_dir), config.run
        self._server = None
        if isinstance(config, TrainingConfig) and config.metrics_server is not None:
            # Imported only here, because most runs have no metrics server and need not wait for the import of its library.
            from trivet.telemetry.metrics_server import MetricsServer

            self._server = MetricsServer(config.metrics_server)
        self._role = role
        self._events = EventWriter(layout.events, role=role, attempt=run.attempt, check=check)

        def open_metrics(name: str) -> MetricsWriter:
            return MetricsWriter(layout.metrics / f"{name}.jsonl", resume_step=resume_step, check=check)

        self._metrics = open_metrics(role)
        self._evals = open_metrics("eval") if role == "orchestrator" else None
        self._heartbeat = Heartbeat(config.heartbeat.url) if config.heartbeat is not None else None
        self._detectors = make_detectors(config.detectors)
        self._shown_samples = config.shown_samples if isinstance(config, OrchestratorConfig) else None
        self._sinks = open_sinks(
            wandb=config.wandb,
            tracking=config.tracking,
            role=role,
            run=run,
            output_dir=layout.root,
            resume_step=resume_step,
        )

    def write_step(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a finished step to all outputs, and check them with the detectors.

        Raises:
            Diverged: a detector that is set to `stop` found a problem. The metrics have been written before.
        """
        self._metrics.write(step, values)
        for sink in self._sinks:
            sink.write_step(step, values)
        if self._server is not None:
            self._server.update(step, values)
        logger.log(SUCCESS, "%s", step_line(self._role, step, values))
        if self._heartbeat is not None:
            self._heartbeat.send()
        check_step(self._detectors, step, values)

    def write_eval(self, version: int, values: Mapping[str, float]) -> None:
        """Write the scores of a policy to metrics/eval.jsonl and the console."""
        assert self._evals is not None, "only the orchestrator evaluates during a run"
        self._evals.write(version, values)
        for sink in self._sinks:
            sink.write_eval(version, values)
        logger.log(SUCCESS, "%s", eval_line(version, values))

    def show_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Show some rollouts of a step on the console and in W&B, at the configured intervals."""
        shown = self._shown_samples
        if shown is not None and step % shown.interval == 0:
            for rollout in rollouts[: shown.count]:
                for line in sample_lines(step, rollout, max_chars=shown.max_chars):
                    logger.log(SUCCESS, "%s", line)
        for sink in self._sinks:
            sink.write_rollouts(step, rollouts)

    def write_event(self, event: Event) -> None:
        """Append the event to events.jsonl."""
        self._events.write(event)

    def sync_events(self) -> None:
        """Return once every event is on disk. Called before a checkpoint is committed that needs the events."""
        self._events.sync()

    def close(self) -> None:
        """Close every output. May be called again."""
        for output in (self._events, self._metrics, self._evals, self._server, self._heartbeat, *self._sinks):
            if output is not None:
                output.close()
        self._heartbeat, self._sinks = None, []


class Heartbeat:
    """Sends a GET request to the user's URL after every step, which shows a monitoring service that the run is alive.

    A thread sends it, so no step waits. While a request is under way, no further one is sent.
    """

    def __init__(self, url: str, *, transport: httpx.BaseTransport | None = None) -> None:
        """Send nothing yet.

        Args:
            transport: replaces the network in tests; None for the network.
        """
        self._url = url
        self._transport = transport
        self._call: threading.Thread | None = None
        self._has_failed = False

    def send(self) -> None:
        """Send a request, unless one is under way."""
        if self._call is not None and self._call.is_alive():
            return
        self._call = threading.Thread(target=self._get, name="heartbeat", daemon=True)
        self._call.start()

    def close(self) -> None:
        """Wait for a request that is under way, at most for its time-out."""
        if self._call is not None:
            self._call.join(_HEARTBEAT_TIMEOUT_S)

    def _get(self) -> None:
        try:
            with httpx.Client(timeout=_HEARTBEAT_TIMEOUT_S, transport=self._transport) as client:
                client.get(self._url).raise_for_status()
            self._has_failed = False
        except (httpx.HTTPError, *PROXY_ERRORS) as exc:
            reason = f"{type(exc).__name__}: {exc}"
            if isinstance(exc, httpx.HTTPStatusError):  # its text has the whole URL, which may have a secret
                reason = f"the service answered {exc.response.status_code}"
            if not self._has_failed:
                logger.warning("heartbeat.url was not reached: %s; the run goes on, without further warnings", reason)
            self._has_failed = True


def check_step(detectors: Iterable[Detector], step: int, metrics: Mapping[str, float]) -> None:
    """Check a step's metrics with each detector, and warn or stop as `[detectors]` configures.

    Raises:
        Diverged: a detector that is set to `stop` found a problem.
    """
    for detector in detectors:
        finding = detector.check(metrics)
        if finding is not None and detector.reaction == "stop":
            raise Diverged(f'step {step}: {finding} (detectors.{detector.name} = "stop")')
        if finding is not None:
            logger.warning("step %s: %s (detectors.%s)", step, finding, detector.name)
