"""Entry of the environment workers of a node that has no orchestrator, started by the launcher of a run over several nodes.

It reads the orchestrator's configuration, with the number of its own node: `@ orchestrator.toml --env-nodes.own 2`.
"""

import asyncio
import os

from trivet.config.command import run_command
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.nodes.pool_server import PoolServer
from trivet.environments.packages.interpreters import require_environment
from trivet.errors import ConfigError
from trivet.orchestrator.connections import open_own_workers
from trivet.process.event_loop import run_until_signalled, show_tasks_on_signal
from trivet.secret import find_secret
from trivet.telemetry import process_report
from trivet.telemetry.logs import setup_logging
from trivet.wire.status import RUNNING_GROUPS


def main() -> int:
    """Run the command and return its exit code."""
    return run_command(OrchestratorConfig, start, check=check)


def check(config: OrchestratorConfig) -> None:
    """Refuse what cannot start, before anything does."""
    if config.env_nodes is None:
        raise ConfigError("the launcher of a run over several nodes starts this: set deployment.env_worker_nodes")
    for env in config.environments.values():
        require_environment(env)


def start(config: OrchestratorConfig) -> int:
    """Run the workers with a resolved configuration and return the exit code."""
    assert config.env_nodes is not None
    setup_logging("env-workers", level=config.log.level, as_json=config.log.json_logging)
    process_report.start_reports(
        RunLayout(config.output_dir), role=f"env-workers-{config.env_nodes.own}", attempt=config.run.attempt
    )
    process_report.begin("loading environments")
    return asyncio.run(_run(config))


async def _run(config: OrchestratorConfig) -> int:
    async def work() -> int:
        """Serve until the launcher ends it."""
        assert config.env_nodes is not None
        async with open_own_workers(config, name_suffix=f"@{config.env_nodes.own}") as pool:
            process_report.begin(RUNNING_GROUPS)
            await PoolServer(pool, config.env_nodes, secret=find_secret(RunLayout(config.output_dir), environ=os.environ)).run()
        return 0

    show_tasks_on_signal()
    return await run_until_signalled(work())


if __name__ == "__main__":
    raise SystemExit(main())
