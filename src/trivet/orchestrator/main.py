"""Entry of the orchestrator role: `uv run orchestrator @ orchestrator.toml`, or started by the launcher."""

import asyncio
import signal
from typing import TYPE_CHECKING

from trivet.checkpoints.resume import choose_start
from trivet.config.command import run_command
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.packages.interpreters import require_environment
from trivet.faults import arm
from trivet.orchestrator.advantage import make_advantage
from trivet.process.event_loop import run_until_signalled, show_tasks_on_signal
from trivet.process.imports import importing
from trivet.process.lock import hold_role
from trivet.telemetry import process_report
from trivet.telemetry.logs import setup_logging
from trivet.transport.recording import require_replayable

if TYPE_CHECKING:
    from trivet.orchestrator.loop import Loop


def main() -> int:
    """Run the command and return its exit code."""
    return run_command(OrchestratorConfig, start, check=check)


def check(config: OrchestratorConfig) -> None:
    """Check before anything starts what can be checked without it: environments, checkpoint, advantage function, replay."""
    for env in config.environments.values():
        require_environment(env)
    choose_start(config)
    make_advantage(config.advantage)
    require_replayable(config)


def start(config: OrchestratorConfig) -> int:
    """Run the role with a resolved configuration and return its exit code."""
    setup_logging("orchestrator", level=config.log.level, as_json=config.log.json_logging)
    arm(config.faults.schedule)
    process_report.start_reports(RunLayout(config.output_dir), role="orchestrator", attempt=config.run.attempt)
    process_report.begin("loading environments")
    with importing():
        import trivet.orchestrator.start  # noqa: F401  # pyright: ignore[reportUnusedImport]  # imports verifiers, which takes seconds
    lock = RunLayout(config.output_dir).role_lock("orchestrator")
    with hold_role(lock, is_over_nodes=config.rollout_transport.is_between_machines):
        return asyncio.run(_run(config))


async def _run(config: OrchestratorConfig) -> int:
    """Run the orchestrator and return its exit code.

    0: done, or preempted by SIGUSR1. 130, 143: ended by SIGINT or SIGTERM. 138: SIGUSR1 came before there was a loop to preempt.
    """
    from trivet.orchestrator.environment_node import open_environments
    from trivet.orchestrator.start import run

    running: list[Loop] = []

    def preempt() -> bool:
        for loop in running:
            loop.preempt()
        return bool(running)

    async def work() -> int:
        async with open_environments(config) as pool:
            await run(config, pool, on_loop=running.append)
        return 0

    show_tasks_on_signal()
    return await run_until_signalled(work(), handlers={signal.SIGUSR1: preempt})


if __name__ == "__main__":
    raise SystemExit(main())
