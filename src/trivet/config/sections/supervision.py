"""Section for what the launcher does about a role that ends or hangs, and about a request to stop."""

from typing import Literal

from pydantic import Field

from trivet.config.sections.base import MAX_WAIT_S, Section


class RecoveryConfig(Section):
    """Inference is restarted alone; trainer and orchestrator go back to the newest checkpoint together."""

    max_restarts: int = Field(default=3, ge=0)
    """Restarts of inference, and of trainer with orchestrator, within restart_window_s; one failure more ends the run. 0: none."""
    restart_window_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """Restarts longer ago than this many seconds no longer count."""
    backoff_s: float = Field(default=1.0, ge=0, le=MAX_WAIT_S)
    """Wait before the first restart within the window, seconds; it doubles with each further one, up to a minute."""
    preemption_grace_s: float = Field(default=60.0, ge=0, le=MAX_WAIT_S)
    """After SIGTERM the roles have this many seconds to finish the step and commit a checkpoint. 0: stop at once."""
    watchdog_timeout_s: float = Field(default=120.0, gt=2, le=MAX_WAIT_S)
    """A process that has not reported for this many seconds is named as stuck. Each reports every second, whatever it does."""
    stall_warn_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """When for this many seconds nothing that the roles say about themselves has changed, the run says who waits for whom, and each
    process writes its stacks into its log; it says so again after twice the time. Nothing is ended for it."""
    on_stuck: Literal["warn", "restart", "stop"] = "restart"
    """What follows for a stuck role: a warning alone, a restart as if it had died, or the end of the run."""
