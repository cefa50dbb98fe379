"""Writes everything that a role reports: step lines, metrics, events and W&B. Owned by the role's loop; one per process."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trivet.config.layout import RunLayout
from trivet.config.sections.detectors import DetectorsConfig
from trivet.config.sections.orchestrator import ShownSamplesConfig
from trivet.config.sections.shared import HeartbeatConfig, MetricsServerConfig, RunIdentity, WandbConfig
from trivet.telemetry.console import LINES, eval_line, sample_lines
from trivet.telemetry.events import EventWriter
from trivet.telemetry.heartbeat import Heartbeat
from trivet.telemetry.logs import SUCCESS
from trivet.telemetry.metrics import MetricsWriter
from trivet.telemetry.watch import Watch
from trivet.wire.events import Event
from trivet.wire.rollouts import Rollout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOutputs:
    """The outputs besides the run's own files; None switches one off."""

    wandb: WandbConfig | None = None
    heartbeat: HeartbeatConfig | None = None
    shown_samples: ShownSamplesConfig | None = None
    metrics_server: MetricsServerConfig | None = None


class Telemetry:
    """Hands each step, evaluation and event to the outputs that are configured.

    >>> telemetry = Telemetry("trainer", layout=layout, run=config.run, resume_step=0)
    >>> telemetry.write_event(Start(run_id=config.run.id, from_step=0))
    >>> telemetry.write_step(1, {"loss/mean": 0.5, "time/step": 2.0})
    >>> telemetry.close()
    """

    def __init__(
        self,
        role: Literal["trainer", "orchestrator", "sft"],
        *,
        layout: RunLayout,
        run: RunIdentity,
        detectors: DetectorsConfig | None = None,
        outputs: TelemetryOutputs = TelemetryOutputs(),
        resume_step: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the role's outputs.

        Args:
            check: called before each event and line of metrics; raises when this role must not write any more.

        Raises:
            ConfigError: the metrics server's port is taken.
        """
        self._server = None
        if outputs.metrics_server is not None:
            # Most runs have none, and need not pay for importing its library.
            from trivet.telemetry.metrics_server import MetricsServer

            self._server = MetricsServer(outputs.metrics_server)
        self._make_line = LINES[role]
        self._events = EventWriter(layout.events, role=role, attempt=run.attempt, check=check)

        def open_metrics(name: str) -> MetricsWriter:
            return MetricsWriter(layout.metrics / f"{name}.jsonl", resume_step=resume_step, check=check)

        self._metrics = open_metrics(role)
        self._evals = open_metrics("eval") if role == "orchestrator" else None
        self._heartbeat = Heartbeat(outputs.heartbeat.url) if outputs.heartbeat is not None else None
        self._watch = Watch(detectors) if detectors is not None else None
        self._shown_samples = outputs.shown_samples
        self._wandb = None
        if outputs.wandb is not None:
            # Importing W&B costs a second that a run without it need not pay.
            from trivet.telemetry.wandb_sink import WandbSink

            self._wandb = WandbSink(outputs.wandb, role=role, run_id=run.id, output_dir=layout.root)

    def write_step(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a finished step, and the console line made of them.

        Raises:
            Diverged: a detector that is set to `stop` spoke; all was written before.
        """
        self._metrics.write(step, values)
        if self._wandb is not None:
            self._wandb.write(step, values)
        if self._server is not None:
            self._server.update(step, values)
        logger.log(SUCCESS, "%s", self._make_line(step, values))
        if self._heartbeat is not None:
            self._heartbeat.beat()
        if self._watch is not None:
            self._watch.look(step, values)

    def write_eval(self, version: int, values: Mapping[str, float]) -> None:
        """Write the scores of a policy to metrics/eval.jsonl and the console."""
        assert self._evals is not None, "only the orchestrator evaluates during a run"
        self._evals.write(version, values)
        if self._wandb is not None:
            self._wandb.write_eval(version, values)
        logger.log(SUCCESS, "%s", eval_line(version, values))

    def show_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Show some rollouts of a step on the console and in W&B, every so many steps."""
        shown = self._shown_samples
        if shown is not None and step % shown.interval == 0:
            for rollout in rollouts[: shown.count]:
                for line in sample_lines(step, rollout, max_chars=shown.max_chars):
                    logger.log(SUCCESS, "%s", line)
        if self._wandb is not None:
            self._wandb.write_rollouts(step, rollouts)

    def write_event(self, event: Event) -> None:
        """Append the event to events.jsonl."""
        self._events.write(event)

    def sync_events(self) -> None:
        """Return once every event is on disk: before a checkpoint is committed that relies on them."""
        self._events.sync()

    def close(self) -> None:
        """Close every output. May be called again."""
        self._events.close()
        self._metrics.close()
        if self._evals is not None:
            self._evals.close()
        if self._server is not None:
            self._server.close()
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        if self._wandb is not None:
            self._wandb.close()
            self._wandb = None
