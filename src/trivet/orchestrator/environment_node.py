"""Loads the environments of a run in worker processes, for the orchestrator.

In a run over several nodes the launcher also starts this module as a program, on each node that has environment workers. Its
arguments are the orchestrator's configuration and the number of its node: `@ orchestrator.toml --env-nodes.own 2`. After SIGTERM it
takes no new groups, finishes those that run and exits with 0; a second SIGTERM, or SIGINT, ends it at once.
"""

import asyncio
import os
import signal
import tomllib
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from trivet.config.command import run_command
from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EnvNodesConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.nodes.node_pools import open_node_pools
from trivet.environments.nodes.pool_server import PoolServer
from trivet.environments.packages.interpreters import require_environment
from trivet.environments.port import EnvironmentPool
from trivet.environments.settings import run_settings
from trivet.environments.workers.pool import WorkerPool, open_worker_pool
from trivet.errors import ConfigError
from trivet.process.event_loop import run_until_signalled, show_tasks_on_signal
from trivet.process.proxies import direct_variables
from trivet.secret import find_secret
from trivet.telemetry import process_report
from trivet.telemetry.logs import setup_logging
from trivet.wire.status import RUNNING_GROUPS


@asynccontextmanager
async def open_environments(config: OrchestratorConfig) -> AsyncGenerator[EnvironmentPool, None]:
    """Load every environment of the run in worker processes, here or on other nodes. In a replay the pool is empty."""
    if config.replay is not None:
        async with open_worker_pool([], log_of=RunLayout(config.output_dir).env_worker_log, limits=config) as pool:
            yield pool
        return
    if config.env_nodes is None:
        async with open_own_workers(config) as pool:
            yield pool
        return
    secret = find_secret(RunLayout(config.output_dir), environ=os.environ)
    async with open_node_pools(config.env_nodes, secret=secret, timeout_s=config.env_start_timeout_s) as pool:
        yield pool


def open_own_workers(config: OrchestratorConfig, *, name_suffix: str = "") -> AbstractAsyncContextManager[WorkerPool]:
    """Load every environment of the run in worker processes of this machine.

    Args:
        name_suffix: appended to the names of workers and of their logs, in a run with workers on several nodes.
    """
    teacher = config.teacher_model.client.base_url if config.teacher_model is not None else []
    # Exclude the servers from proxies. Judges and tools in the workers have clients of their own, which read these variables.
    os.environ.update(direct_variables(os.environ, [*config.client.base_url, *teacher]))
    settings = list(run_settings(config).values())
    layout = RunLayout(config.output_dir)
    return open_worker_pool(
        settings, log_of=lambda env: layout.env_worker_log(f"{env}{name_suffix}"), limits=config, name_suffix=name_suffix
    )


def main() -> int:
    """Run the command and return its exit code."""
    return run_command(OrchestratorConfig, start, check=check)


def check(config: OrchestratorConfig) -> None:
    """Check before anything starts that the program belongs to a node and that its environments are installed."""
    if config.env_nodes is None:
        raise ConfigError("the launcher of a run over several nodes starts this: set deployment.num_env_nodes")
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
    return asyncio.run(_serve(config, config.env_nodes))


async def _serve(config: OrchestratorConfig, nodes: EnvNodesConfig) -> int:
    """Serve until the launcher ends the process. Return 0 after an orderly end; 143 when SIGTERM came while workers loaded."""
    layout, servers = RunLayout(config.output_dir), list[PoolServer]()

    async def work() -> int:
        async with open_own_workers(config, name_suffix=f"@{nodes.own}") as pool:
            process_report.begin(RUNNING_GROUPS)
            secret = find_secret(layout, environ=os.environ)
            servers.append(PoolServer(pool, nodes, secret=secret, read_config=lambda: read_nodes(layout)))
            await servers[0].run()
        return 0

    show_tasks_on_signal()
    return await run_until_signalled(work(), handlers={signal.SIGTERM: lambda: any(server.drain() for server in servers)})


def read_nodes(layout: RunLayout) -> EnvNodesConfig:
    """Return what the launcher has written last about the nodes, with the address of the orchestrator.

    Raises:
        OSError: the file cannot be read.
    """
    return EnvNodesConfig.model_validate(tomllib.loads((layout.configs / "orchestrator.toml").read_text())["env_nodes"])


if __name__ == "__main__":
    raise SystemExit(main())
