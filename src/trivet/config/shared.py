"""Sections that more than one role has."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from trivet.config.base import Section


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is written."""


class LogExtrasConfig(Section):
    """What the orchestrator logs to W&B beside numbers."""

    samples: bool = True
    """A table of rollouts: prompt, completion, reward, advantage."""
    distributions: bool = True
    """Histograms of rewards, advantages and completion lengths."""
    interval: int = Field(default=10, ge=1)
    """Steps between them: tables are slow to draw."""
    max_samples: int = Field(default=8, ge=1)
    """Rollouts per table."""


class WandbConfig(Section):
    project: str = "trivet"
    """W&B project."""
    name: str | None = None
    """Run name; W&B makes one up when unset. Both roles log to one shared run."""
    offline: bool = False
    """Write to disk only; `wandb sync` uploads it later."""
    log_extras: LogExtrasConfig | None = LogExtrasConfig()
    """None: numbers only."""


class HeartbeatConfig(Section):
    url: str
    """Gets a GET request after every step, for a monitoring service that raises the alarm when they stop."""


class CkptConfig(Section):
    interval: int | None = Field(default=None, ge=1)
    """Commit a checkpoint every this many steps; unset: only after the last step."""
    resume_step: int | None = Field(default=None, ge=-1)
    """Start from the checkpoint of this step; -1 takes the newest committed one."""
    keep_last: int | None = Field(default=None, ge=1)
    """Keep this many of the newest checkpoints; unset with keep_interval unset: keep all."""
    keep_interval: int | None = Field(default=None, ge=1)
    """Keep the checkpoints of every multiple of this for ever, besides keep_last."""


class TransportConfig(Section):
    """ZeroMQ between orchestrator and trainer. The trainer listens, the orchestrator connects."""

    host: str = "127.0.0.1"
    """Where the trainer listens. Another interface's address lets roles on other machines connect."""
    port: int = Field(default=5555, ge=1, le=65535)
    """TCP port; the launcher replaces it by a free one if it is taken."""
    max_message_mib: int = Field(default=512, ge=1)
    """A larger batch is refused before it is sent."""
    resend_interval_s: float = Field(default=5.0, gt=0)
    """A batch is sent again after this long without an acknowledgement."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait for the other role (for a batch in the trainer, for an acknowledgement in the orchestrator), seconds."""


class RunIdentity(Section):
    """Set by the launcher; roles started by hand on several machines need the same values."""

    id: str = "local"
    """Messages of another run are refused."""
    attempt: int = Field(default=1, ge=1)
    """Counts the starts of this run, resumes included."""


DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
DEFAULT_OUTPUT_DIR = Path("outputs")
