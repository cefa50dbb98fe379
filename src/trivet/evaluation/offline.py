"""Evaluates policies one after the other, all environments of a policy at the same time. Called by the command `eval`.

Consumes targets (evaluation/targets). Produces evals/step_N/<env>/ and W&B points. Waits for groups, each bounded by the pool of
environments, and for servers, bounded by theirs.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from rich.console import Console

from trivet.config.layout import STABLE, RunLayout
from trivet.config.schema.environment import EvalEnvConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.environments.port import EnvironmentPool
from trivet.environments.sampling import sampling_arguments
from trivet.evaluation.evaluate import evaluate, make_task, retry_failed_groups
from trivet.evaluation.placement import run_on_least_loaded
from trivet.evaluation.progress import ProgressView
from trivet.evaluation.results import TaskRecord, holds_task, require_continuable
from trivet.evaluation.scores import Summary, eval_metrics
from trivet.evaluation.servers import EvalServers
from trivet.evaluation.targets import Target, is_due
from trivet.evaluation.weights_reader import WeightsReader
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.versions import PolicyVersion

logger = logging.getLogger(__name__)


class ScoreSink(Protocol):
    """Receives scores, besides the files. Adapter: `telemetry.wandb_sink.WandbSink`."""

    def write_eval(self, version: int, values: Mapping[str, float]) -> None:
        """Write the scores of one policy."""
        ...


class OfflineEval:
    """One run of the command `eval`."""

    def __init__(
        self,
        config: EvalConfig,
        *,
        envs: Sequence[EvalEnvConfig],
        servers: EvalServers,
        pool: EnvironmentPool,
        layout: RunLayout,
        reader: WeightsReader,
        console: Console,
        sink: ScoreSink | None = None,
    ) -> None:
        self._config = config
        self._envs = envs
        self._servers = servers
        self._pool = pool
        self._layout = layout
        self._reader = reader
        self._console = console
        self._sink = sink
        self.summaries: list[Summary] = []
        """One per environment and policy that has been evaluated."""
        self.num_removed = 0
        """Policies that were removed before they could be evaluated."""

    async def run(self, targets: AsyncIterator[Target]) -> None:
        """Evaluate every target.

        Raises:
            ConfigError: the results to continue are of another evaluation.
            InferenceError: no server can serve a policy.
        """
        async for target in targets:
            self._reader.need(target.step)
            if target.directory is not None and not (target.directory / STABLE).exists():
                self.num_removed += 1
                logger.warning("%s was removed before it could be evaluated", target.directory)
                continue
            self.summaries += await self._evaluate(target)

    async def _evaluate(self, target: Target) -> list[Summary]:
        digest = await self._servers.ensure_policy(target)
        envs = select_envs(self._config, target, self._envs)
        infos = self._pool.infos
        tasks = {env.label: make_env_task(self._config, env, infos[env.label], step=target.step, digest=digest) for env in envs}
        self._require_results_fit(tasks)
        largest_group = max(task.rollouts_per_example for task in tasks.values())
        slots = asyncio.Semaphore(max(self._config.max_concurrent // largest_group, 1))
        has_bars = self._config.use_tqdm and self._console.is_terminal
        with ProgressView(self._console, has_bars=has_bars) as view:
            async with asyncio.TaskGroup() as running:
                measured = [
                    running.create_task(
                        self._evaluate_one(task, name, target=target, slots=slots, view=view), name=f"eval-{name}"
                    )
                    for name, task in tasks.items()
                ]
        summaries = [one.result() for one in measured]
        if self._sink is not None:
            self._sink.write_eval(target.step, eval_metrics({summary.env: summary for summary in summaries}))
        for summary in summaries:
            logger.info("evaluated step=%s env=%s avg=%s failed=%s", target.name, summary.env, summary.avg, summary.num_failed)
        return summaries

    async def _evaluate_one(
        self, task: TaskRecord, name: str, *, target: Target, slots: asyncio.Semaphore, view: ProgressView
    ) -> Summary:
        retry = self._config.retry
        version = None if self._servers.is_plain else PolicyVersion(target.step)
        run_group = partial(run_on_least_loaded, run_group=self._pool.run_group, servers=self._servers, version=version)
        return await evaluate(
            task,
            env=name,
            run_group=retry_failed_groups(run_group, max_attempts=retry.max_attempts, pause_s=retry.pause_s),
            slots=slots,
            directory=self._layout.evals_step(target.step, name),
            does_continue=self._config.resume_path is not None,
            does_reraise=retry.reraise,
            on_progress=view.begin(f"{target.name} {name}", total=task.num_examples),
        )

    def _require_results_fit(self, tasks: Mapping[str, TaskRecord]) -> None:
        for name, task in tasks.items():
            directory = self._layout.evals_step(task.step, name)
            if self._config.resume_path is not None:
                require_continuable(directory, task)
            elif directory.exists() and not holds_task(directory, task):
                logger.warning("results of another evaluation in %s are replaced", directory)


def select_envs(config: EvalConfig, target: Target, envs: Sequence[EvalEnvConfig]) -> list[EvalEnvConfig]:
    """Return the environments that `target` is evaluated on."""
    return [env for env in envs if target.directory is None or is_due(config, target.step, env)]


def make_env_task(config: EvalConfig, env: EvalEnvConfig, info: EnvironmentInfo, *, step: int, digest: str) -> TaskRecord:
    """Return the task that evaluates `env` with the numbers and sampling of the configuration.

    Raises:
        ConfigError: nothing is left to evaluate.
    """
    sampling = env.sampling.over(config.sampling)
    return make_task(
        env,
        info,
        step=step,
        digest=digest,
        num_examples=config.num_examples if env.num_examples is None else env.num_examples,
        rollouts_per_example=env.rollouts_per_example or config.rollouts_per_example,
        sampling=sampling_arguments(sampling, temperature=sampling.temperature),
        skip_first=env.skip_first,
    )
