"""All that a role says about itself: one line per step, metrics, events and W&B. Owned by the role's loop; one per process."""

import logging
from collections.abc import Mapping
from typing import Literal

from trivet.config.layout import RunLayout
from trivet.config.shared import RunIdentity, WandbConfig
from trivet.telemetry.console import LINES
from trivet.telemetry.events import EventWriter
from trivet.telemetry.logs import SUCCESS
from trivet.telemetry.metrics import MetricsWriter
from trivet.wire.events import Event

logger = logging.getLogger(__name__)


class Telemetry:
    """
    >>> telemetry = Telemetry("trainer", layout=layout, run=config.run, wandb=config.wandb, resume_step=0)
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
        wandb: WandbConfig | None = None,
        resume_step: int = 0,
    ) -> None:
        self._make_line = LINES[role]
        self._events = EventWriter(layout.events, role=role, attempt=run.attempt)
        self._metrics = MetricsWriter(layout.metrics / f"{role}.jsonl", resume_step=resume_step)
        self._wandb = None
        if wandb is not None:
            # Importing W&B costs a second that a run without it need not pay.
            from trivet.telemetry.wandb_sink import WandbSink

            self._wandb = WandbSink(wandb, role=role, run_id=run.id, output_dir=layout.root)

    def write_step(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a finished step, and the console line made of them."""
        self._metrics.write(step, values)
        if self._wandb is not None:
            self._wandb.write(step, values)
        logger.log(SUCCESS, "%s", self._make_line(step, values))

    def write_event(self, event: Event) -> None:
        self._events.write(event)

    def sync_events(self) -> None:
        """Returns once every event is on disk: before a checkpoint is committed that relies on them."""
        self._events.sync()

    def close(self) -> None:
        """May be called again."""
        self._events.close()
        self._metrics.close()
        if self._wandb is not None:
            self._wandb.close()
            self._wandb = None
