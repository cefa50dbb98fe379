"""Runs the command `eval`: evaluates the start model and published policies on running servers, one after the other.

Consumes targets: the policies to evaluate (`evaluation.targets`). Produces evals/step_N/<env>/ and points in trackers. Waits for
groups (`WorkerPool` bounds each wait) and for servers (`ServerPool` bounds each wait).
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from trivet.config.command import run_command
from trivet.config.layout import STABLE
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.shared import RunIdentity
from trivet.environments.port import EnvironmentPool
from trivet.environments.settings import host_settings
from trivet.environments.workers.pool import open_worker_pool
from trivet.evaluation.endpoints import KEY_VARIABLE
from trivet.evaluation.evaluate import Evaluator
from trivet.evaluation.plan import EvalPlan, check_servers, make_plan, require_resumable
from trivet.evaluation.results import EarlierResults
from trivet.evaluation.scores import Summary, eval_metrics
from trivet.evaluation.servers import EvalServers, connect
from trivet.evaluation.targets import WeightsReader, follow_targets
from trivet.process.event_loop import run_until_signalled
from trivet.process.proxies import direct_variables, is_direct
from trivet.schedulers.submit import submit
from trivet.telemetry.logs import setup_logging
from trivet.telemetry.sinks import open_sinks

logger = logging.getLogger(__name__)

_LOG_WIDTH = 120
"""Width of the table of scores, in characters, where stdout is no terminal."""
_REPORT_INTERVAL_S = 10.0
"""Seconds between two log lines about the progress, where no progress bars are shown."""


def main() -> int:
    """Run the command; return its exit code."""
    return run_command(EvalConfig, start, check=check, submit=partial(submit, command="eval"))


def check(config: EvalConfig) -> None:
    """Check that the evaluation can be planned, before anything is started; raises as `make_plan`."""
    make_plan(config, environ=os.environ)


def start(config: EvalConfig) -> int:
    """Evaluate; return the exit code of `evaluate_targets`, or 130 or 143 when a signal ended it."""
    setup_logging("eval", level=config.log.level, as_json=config.log.json_logging)
    plan = make_plan(config, environ=os.environ)
    console = Console() if sys.stdout.isatty() else Console(width=_LOG_WIDTH)
    # A second signal must not interrupt the restoring of the servers' policies.
    exit_code = asyncio.run(run_until_signalled(_run(plan, console), is_cleanup_protected=True))
    if exit_code > 128:
        logger.warning("interrupted; the same command with --resume-path %s continues", plan.layout.root)
    return exit_code


async def _run(plan: EvalPlan, console: Console) -> int:
    """Connect to the servers, start the workers and evaluate; return the exit code."""
    config = plan.config
    if plan.endpoint is not None and (key := plan.endpoint.literal_key):
        os.environ[KEY_VARIABLE] = key
    os.environ.update(direct_variables(os.environ, [url for url in plan.client.base_url if is_direct(url, os.environ)]))
    servers = await connect(
        plan.client, environ=os.environ, weights_dir=config.weights_dir, weights_url=plan.origin.weights_url
    )
    try:
        model_name, base_digest = await check_servers(plan, servers)
        settings = [
            host_settings(
                env,
                model_name=model_name,
                client=plan.client,
                trajectory_strategy=plan.origin.trajectory_strategy,
                rollout_timeout_s=config.rollout_timeout_s,
                log_level=config.log.level,
                is_plain=servers.is_plain,
            )
            for env in plan.envs
        ]
        async with open_worker_pool(settings, log_of=plan.layout.eval_worker_log, limits=config) as pool:
            require_resumable(plan, pool, base_digest=base_digest)
            run = RunIdentity(id=f"eval-{time.time():.0f}-{os.getpid()}")
            opened = open_sinks(wandb=config.wandb, tracking=config.tracking, role="eval", run=run, output_dir=plan.layout.root)
            with ExitStack() as stack:
                sinks = [stack.enter_context(closing(sink)) for sink in opened]

                def write_scores(version: int, values: Mapping[str, float]) -> None:
                    for sink in sinks:
                        sink.write_eval(version, values)

                return await evaluate_targets(plan, servers, pool, console, write_scores)
    finally:
        await servers.aclose()


async def evaluate_targets(
    plan: EvalPlan,
    servers: EvalServers,
    pool: EnvironmentPool,
    console: Console,
    write_scores: Callable[[int, Mapping[str, float]], None],
) -> int:
    """Evaluate every policy, watch the servers and workers meanwhile, and print the scores.

    Args:
        write_scores: gets the step and the metrics of each evaluated policy.

    Returns:
        The exit code: 1 when a policy was removed before its evaluation, nothing was evaluated, or an environment has no score at
        all; else 0.

    Raises:
        ConfigError: the results to continue are of another evaluation.
        InferenceError: no server can serve a policy.
    """
    config, reader = plan.config, WeightsReader(plan.config.weights_dir)
    evaluator = Evaluator(
        pool=pool,
        servers=servers.placement,
        layout=plan.layout,
        max_concurrent=config.max_concurrent,
        retry=config.retry,
        has_versions=not servers.is_plain,
    )
    earlier = EarlierResults.REPLACE if config.resume_path is None else EarlierResults.REQUIRE_SAME
    all_summaries: list[Summary] = []
    num_removed = 0
    reader.need(min((target.step for target in plan.targets), default=0))
    try:
        async with asyncio.TaskGroup() as tasks:
            loops = {"workers": pool.run, "servers": servers.run, "weights-reader": reader.run}
            background_tasks = [tasks.create_task(run(), name=name) for name, run in loops.items()]
            async for target in follow_targets(config, plan.targets, envs=plan.envs, max_steps=plan.origin.max_steps):
                reader.need(target.step)
                if target.directory is not None and not (target.directory / STABLE).exists():
                    num_removed += 1
                    logger.warning("%s was removed before it could be evaluated", target.directory)
                    continue
                digest = await servers.ensure_policy(target)
                with _show_progress(console, has_bars=config.use_tqdm and console.is_terminal) as begin:
                    summaries = await evaluator.evaluate(
                        plan.series_of(target),
                        step=target.step,
                        digest=digest,
                        earlier=earlier,
                        on_start=lambda series, total, begin=begin, policy=target.name: begin(f"{policy} {series.name}", total),
                    )
                all_summaries += summaries
                write_scores(target.step, eval_metrics({summary.env: summary for summary in summaries}))
                for summary in summaries:
                    logger.info(
                        "evaluated step=%s env=%s avg=%s failed=%s", target.name, summary.env, summary.avg, summary.num_failed
                    )
            for task in background_tasks:
                task.cancel()
    finally:
        reader.close()
        if all_summaries:
            console.print(_make_table(all_summaries))
            console.print(f"results: {plan.layout.evals}")
    is_without_score = any(summary.num_failed == summary.num_examples for summary in all_summaries)
    return 1 if num_removed or not all_summaries or is_without_score else 0


@contextmanager
def _show_progress(console: Console, *, has_bars: bool) -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Yield a function that begins to show the progress of an evaluation: bars on a terminal, elsewhere log lines.

    The function takes a label and the number of examples. It returns a second function, which must be called after each example.
    """
    if has_bars:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(TextColumn("{task.description}"), *columns, console=console, transient=True) as bars:
            yield lambda label, total: partial(bars.advance, bars.add_task(label, total=total))
        return

    def begin(label: str, total: int) -> Callable[[], None]:
        done, reported_at = 0, time.monotonic()

        def advance() -> None:
            nonlocal done, reported_at
            done += 1
            if done == total or time.monotonic() - reported_at >= _REPORT_INTERVAL_S:
                reported_at = time.monotonic()
                logger.info("evaluating %s: %s of %s examples", label, done, total)

        return advance

    yield begin


def _make_table(summaries: Sequence[Summary]) -> Table:
    table = Table(title="evaluation")
    for column in ("step", "environment", "avg@k", "95 %", "pass@k", "k", "examples", "failed", "truncated", "tokens", "time"):
        table.add_column(column, justify="left" if column == "environment" else "right")
    for summary in summaries:
        table.add_row(
            "base" if summary.step == 0 else str(summary.step),
            summary.env,
            "" if summary.avg is None else f"{summary.avg:.4f}",
            "" if summary.ci95 is None else f"± {summary.ci95:.4f}",
            "" if summary.pass_at_k is None else f"{summary.pass_at_k:.4f}",
            str(summary.rollouts_per_example),
            str(summary.num_examples),
            str(summary.num_failed),
            "" if summary.truncated is None else f"{summary.truncated:.1%}",
            str(summary.completion_tokens),
            f"{summary.seconds:.1f}s",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
