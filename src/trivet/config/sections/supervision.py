"""Section for what the launcher does about a role that ends or hangs, and about a request to stop."""

from typing import Literal

from pydantic import Field

from trivet.config.sections.base import MAX_WAIT_S, Section


class RecoveryConfig(Section):
    """Inference is restarted alone; trainer and orchestrator go back to the newest checkpoint together."""

    max_restarts: int = Field(default=3, ge=0)
    """Restarts of inference, and of trainer with orchestrator, within restart_window_s; one failure more ends the run. 0: none.
    Over several nodes, one that is lost while its role works does not count."""
    restart_window_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """Restarts longer ago than this many seconds no longer count."""
    backoff_s: float = Field(default=1.0, ge=0, le=MAX_WAIT_S)
    """Wait before the first restart within the window, seconds; it doubles with each further one, up to a minute."""
    preemption_grace_s: float = Field(default=60.0, ge=0, le=MAX_WAIT_S)
    """After SIGTERM or SIGHUP the roles have this many seconds to finish the step and commit a checkpoint. 0: stop at once."""
    watchdog_timeout_s: float = Field(default=120.0, gt=2, le=MAX_WAIT_S)
    """A process that has not reported for this many seconds is named as stuck. Each reports every second, whatever it does."""
    stall_warn_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """When no role's report has changed for this many seconds, the run logs which role waits for which, and each process writes its
    stacks into its log. It repeats this after twice the time. No process is ended for it."""
    on_stuck: Literal["warn", "restart", "stop"] = "restart"
    """Reaction to a stuck role: only a warning, a restart as if it had died, or the end of the run."""
