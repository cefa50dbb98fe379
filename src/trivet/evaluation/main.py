"""Runs the command `eval`: evaluates the start model and published policies on running servers, one after the other."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console

from trivet.config.command import run_command
from trivet.config.schema.evaluation import EvalConfig
from trivet.environments.settings import host_settings
from trivet.environments.workers.memory import memory_limit
from trivet.environments.workers.pool import PoolLimits, WorkerPool, open_worker_pool
from trivet.evaluation.offline import OfflineEval, ScoreSink
from trivet.evaluation.plan import EvalPlan, check_servers, export_key, make_plan
from trivet.evaluation.report import make_table
from trivet.evaluation.scores import Summary
from trivet.evaluation.servers import EvalServers, connect
from trivet.evaluation.targets import follow_targets
from trivet.evaluation.weights_reader import WeightsReader
from trivet.process.proxies import direct_variables, is_direct
from trivet.process.signals import run_until_signalled
from trivet.schedulers.submit import submit
from trivet.telemetry.logs import setup_logging
from trivet.wire.workers import HostSettings

logger = logging.getLogger(__name__)

_LOG_WIDTH = 120
"""Characters of the table where stdout is not a terminal, which has a width of its own."""


def main() -> int:
    """Run the command; return its exit code."""
    return run_command(EvalConfig, start, check=check, submit=partial(submit, command="eval"))


def check(config: EvalConfig) -> None:
    """Refuse what cannot be evaluated, before anything is started."""
    make_plan(config, environ=os.environ)


def start(config: EvalConfig) -> int:
    """Evaluate; return the exit code."""
    setup_logging("eval", level=config.log.level, as_json=config.log.json_logging)
    return asyncio.run(_run_or_interrupt(make_plan(config, environ=os.environ), _console()))


async def _run_or_interrupt(plan: EvalPlan, console: Console) -> int:
    """Return the exit code: 0 done, 1 when an evaluation has no score at all, 130 or 143 when a signal ended it."""
    # A second signal must not interrupt the restoring of the servers' policies.
    exit_code = await run_until_signalled(run(plan, console), is_cleanup_protected=True)
    if exit_code > 128:
        logger.warning("interrupted; the same command with --resume-path %s continues", plan.layout.root)
    return exit_code


async def run(plan: EvalPlan, console: Console) -> int:
    """Evaluate what is planned; returns the exit code."""
    export_key(plan.endpoint)
    os.environ.update(direct_variables(os.environ, [url for url in plan.client.base_url if is_direct(url, os.environ)]))
    servers = await connect(plan.client, environ=os.environ, weights_dir=plan.config.weights_dir)
    try:
        model_name = await check_servers(plan, servers)
        settings = _settings(plan, model_name=model_name, is_plain=servers.is_plain)
        async with open_worker_pool(settings, log_of=plan.layout.eval_worker_log, limits=_limits(plan.config)) as pool:
            return await _evaluate(plan, servers, pool, console)
    finally:
        await servers.aclose()


async def _evaluate(plan: EvalPlan, servers: EvalServers, pool: WorkerPool, console: Console) -> int:
    config, reader = plan.config, WeightsReader(plan.config.weights_dir)
    with _sink(plan) as sink:
        evaluation = OfflineEval(
            config,
            envs=plan.envs,
            servers=servers,
            pool=pool,
            layout=plan.layout,
            reader=reader,
            console=console,
            sink=sink,
        )
        targets = follow_targets(config, plan.targets, envs=plan.envs, max_steps=plan.origin.max_steps)
        reader.need(min(target.step for target in plan.targets) if plan.targets else 0)
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = {"workers": pool.run, "servers": servers.run, "weights-reader": reader.run}
                background_tasks = [tasks.create_task(run(), name=name) for name, run in loops.items()]
                await evaluation.run(targets)
                for task in background_tasks:
                    task.cancel()
        finally:
            reader.close()
            if evaluation.summaries:
                console.print(make_table(evaluation.summaries))
                console.print(f"results: {plan.layout.evals}")
    return 1 if evaluation.num_removed or not evaluation.summaries or any(map(_has_no_score, evaluation.summaries)) else 0


def _has_no_score(summary: Summary) -> bool:
    return summary.num_failed == summary.num_examples


def _settings(plan: EvalPlan, *, model_name: str, is_plain: bool) -> list[HostSettings]:
    return [
        host_settings(
            env,
            model_name=model_name,
            client=plan.client,
            trajectory_strategy=plan.origin.trajectory_strategy,
            rollout_timeout_s=plan.config.rollout_timeout_s,
            log_level=plan.config.log.level,
            is_plain=is_plain,
        )
        for env in plan.envs
    ]


def _limits(config: EvalConfig) -> PoolLimits:
    return PoolLimits(
        workers_per_env=config.workers_per_env,
        max_restarts=config.max_env_worker_restarts,
        blocked_timeout_s=config.env_worker_timeout_s,
        start_timeout_s=config.env_start_timeout_s,
        max_memory_bytes=memory_limit(config.max_worker_memory),
        strict_data=config.strict_data,
    )


@contextmanager
def _sink(plan: EvalPlan) -> Iterator[ScoreSink | None]:
    wandb = plan.config.wandb
    if wandb is None:
        yield None
        return
    # Importing W&B costs a second that an evaluation without it need not pay.
    from trivet.telemetry.wandb_sink import WandbSink

    plan.layout.root.mkdir(parents=True, exist_ok=True)
    run_id = f"eval-{time.time():.0f}-{os.getpid()}"
    sink = WandbSink(wandb, role="eval", run_id=run_id, output_dir=plan.layout.root)
    try:
        yield sink
    finally:
        sink.close()


def _console() -> Console:
    """Return a console as wide as the table where stdout is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_LOG_WIDTH)


if __name__ == "__main__":
    raise SystemExit(main())
