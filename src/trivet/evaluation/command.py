"""The command `eval`: the base model and weight directories on a running server, one after the other, as a table and files."""

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from trivet.client.inference_client import InferenceClient
from trivet.config.command import run_command
from trivet.config.evaluation import EvalConfig
from trivet.config.layout import STABLE, RunLayout, parse_step
from trivet.config.shared import DEFAULT_OUTPUT_DIR
from trivet.environments.load import load_host
from trivet.environments.local_pool import LocalPool
from trivet.environments.sampling import sampling_arguments
from trivet.environments.settings import host_settings
from trivet.errors import ConfigError
from trivet.evaluation.evaluate import evaluate, make_task
from trivet.evaluation.scores import Summary
from trivet.telemetry.logs import setup_logging
from trivet.wire.versions import START_VERSION

_LOG_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Target:
    """A policy to evaluate; `directory` is None for the base model."""

    step: int
    directory: Path | None


def choose_targets(config: EvalConfig) -> list[Target]:
    """
    Raises:
        ConfigError: the weights directory is missing, or a named step is not in it.
    """
    targets = [Target(0, None)] if config.eval_base else []
    if config.weights_dir is None:
        if config.steps:
            raise ConfigError(
                "--steps names directories inside --weights-dir, which is not set; add --weights-dir outputs/weights"
            )
        if not targets:
            raise ConfigError("nothing to evaluate: --no-eval-base is given and --weights-dir is not")
        return targets
    if not config.weights_dir.is_dir():
        raise ConfigError(f"weights_dir {str(config.weights_dir)!r} is not a directory")
    complete = {
        step: path
        for path in config.weights_dir.iterdir()
        if (step := parse_step(path.name)) is not None and (path / STABLE).exists()
    }
    available = sorted(complete)
    missing = [step for step in config.steps or [] if step not in complete]
    if missing or not available:
        raise ConfigError(
            f"{config.weights_dir} holds no complete step {', '.join(map(str, missing)) or 'at all'}; "
            f"complete steps there: {', '.join(map(str, available)) or 'none'}"
        )
    return targets + [Target(step, complete[step].resolve()) for step in config.steps or available]


async def run(config: EvalConfig, console: Console) -> list[Summary]:
    targets = choose_targets(config)
    base_url = config.client.base_url[0]
    api_key = config.client.api_key(base_url, os.environ)
    output_dir = config.output_dir or (config.weights_dir.parent if config.weights_dir else DEFAULT_OUTPUT_DIR)
    server = InferenceClient(base_url, timeout_s=config.client.timeout, api_key=api_key, headers=config.client.headers)
    summaries: list[Summary] = []
    held = START_VERSION
    pool: LocalPool | None = None
    try:
        await server.wait_ready(config.client.wait_for_ready_timeout)
        model_name = config.model.name or await server.model_name()
        pool = load_environments(config, model_name)
        for target in targets:
            status = await (server.reload_weights() if target.directory is None else server.update_weights(target.directory))
            held = status.version
            for env in config.env:
                sampling = env.sampling.over(config.sampling)
                task = make_task(
                    env,
                    pool.infos[env.label],
                    step=target.step,
                    digest=status.digest,
                    num_examples=config.num_examples,
                    rollouts_per_example=config.rollouts_per_example,
                    sampling=sampling_arguments(sampling, temperature=sampling.temperature),
                )
                with Progress(console=console, transient=True) as bar:
                    shown = bar.add_task(f"step {target.step} {env.label}", total=task.num_examples)
                    summary = await evaluate(
                        task,
                        env=env.label,
                        run_group=pool.run_group,
                        base_url=base_url,
                        slots=asyncio.Semaphore(max(config.max_concurrent // config.rollouts_per_example, 1)),
                        directory=RunLayout(output_dir).evals_step(target.step, env.label),
                        does_continue=False,
                        on_progress=lambda bar=bar, shown=shown: bar.advance(shown),
                    )
                summaries.append(summary)
    finally:
        if held != START_VERSION:
            await server.reload_weights()
        await server.aclose()
        if pool is not None:
            await pool.aclose()
    console.print(make_table(summaries))
    console.print(f"results: {output_dir / 'evals'}")
    return summaries


def load_environments(config: EvalConfig, model_name: str) -> LocalPool:
    """
    Raises:
        EnvironmentLoadError: one cannot be loaded.
    """
    settings = [host_settings(env, model_name=model_name, client=config.client) for env in config.env]
    return LocalPool({each.name: load_host(each, environ=os.environ) for each in settings})


def make_table(summaries: Sequence[Summary]) -> Table:
    table = Table(title="evaluation")
    for column in ("step", "environment", "avg@k", "95 %", "pass@k", "k", "examples", "failed", "truncated", "tokens", "time"):
        table.add_column(column, justify="left" if column == "environment" else "right")
    for summary in summaries:
        table.add_row(
            "base" if summary.step == 0 else str(summary.step),
            summary.env,
            _number(summary.avg),
            "" if summary.ci95 is None else f"± {summary.ci95:.4f}",
            _number(summary.pass_at_k),
            str(summary.rollouts_per_example),
            str(summary.num_examples),
            str(summary.num_failed),
            "" if summary.truncated is None else f"{summary.truncated:.1%}",
            str(summary.completion_tokens),
            f"{summary.seconds:.1f}s",
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _console() -> Console:
    """A log file has no width of its own: the table is written whole."""
    return Console() if sys.stdout.isatty() else Console(width=_LOG_WIDTH)


def main() -> int:
    def start(config: EvalConfig) -> int:
        setup_logging("eval", level=config.log.level, file=None)
        summaries = asyncio.run(run(config, _console()))
        return 1 if all(summary.num_failed == summary.num_examples for summary in summaries) else 0

    return run_command(EvalConfig, start)
