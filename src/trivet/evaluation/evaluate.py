"""Evaluates environments on one policy: plays their examples, scores the rollouts and writes the results.

The command `eval` calls it, and the orchestrator during a run. It waits while no server is admitted. `ServerPool` ends a run in
which that wait lasts too long.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EnvConfig, EvalEnvConfig, OnlineEvalConfig
from trivet.config.schema.evaluation import EvalConfig, EvalRetryConfig
from trivet.environments.port import EnvironmentPool
from trivet.environments.settings import sampling_arguments
from trivet.errors import ConfigError, RolloutFailed, WorkerLost
from trivet.evaluation.results import EarlierResults, ResultRecord, ResultsFile, TaskRecord, read_summary
from trivet.evaluation.scores import Summary, mean_over_examples, pass_at
from trivet.wire.groups import EnvironmentInfo, GroupRequest, SamplingArguments, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import GroupId, PolicyVersion

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0
"""Seconds between two questions for an admitted server."""
_MAX_SERVER_ATTEMPTS = 3
"""The most attempts at a group whose server or worker is lost each time."""


class PlacementServers(Protocol):
    """Chooses the server of a group. `client.server_pool.ServerPool` and `evaluation.servers.PlainServers` implement it."""

    def pick(self, *, num_rollouts: int) -> str | None:
        """Return the address of the server with the fewest rollouts in flight, and count `num_rollouts` more there.

        Return None while no server is admitted.
        """
        ...

    def release(self, root: str, *, num_rollouts: int) -> None:
        """Count `num_rollouts` rollouts on the server with address `root` as ended."""
        ...

    async def is_at_fault(self, root: str) -> bool:
        """Return whether the server with address `root`, and not the environment, made a group fail."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSeries:
    """An environment that is evaluated on one policy after another."""

    name: str
    """Name of the directory inside evals/step_N/, and part of metric names."""
    env: EnvConfig
    pool_name: str
    """Name of the environment in the pool."""
    interval: int
    """It is evaluated on every `interval`-th step."""
    num_examples: int
    """The most examples; -1: all. They are the environment's evaluation examples or, if it has none, its training examples, as in
    verifiers."""
    rollouts_per_example: int
    sampling: Callable[[int], SamplingArguments]
    """Returns the sampling arguments for a policy version."""
    skip_first: int = 0
    """Examples at the start of the data that are left out."""

    def make_task(self, info: EnvironmentInfo, *, step: int, digest: str) -> TaskRecord:
        """Return the task of evaluating the policy of `step`, whose weights have `digest`.

        Raises:
            ConfigError: nothing is left to evaluate.
        """
        split, available = (Split.EVAL, info.num_eval_examples) if info.num_eval_examples else (Split.TRAIN, info.num_examples)
        num_left = available - self.skip_first
        if num_left <= 0:
            raise ConfigError(
                f"environment {self.env.label!r} has nothing to evaluate on: {available} examples, skip_first = "
                f"{self.skip_first}; check its args, lower skip_first, or take it out"
            )
        return TaskRecord(
            env=self.env.label,
            env_id=self.env.package,
            env_args=self.env.args,
            split=split,
            step=step,
            digest=digest,
            first_example=self.skip_first,
            num_examples=num_left if self.num_examples < 0 else min(self.num_examples, num_left),
            rollouts_per_example=self.rollouts_per_example,
            sampling=self.sampling(step),
            data_digest=info.eval_digest if split is Split.EVAL else info.train_digest,
        )


def make_series(env: EvalEnvConfig, config: EvalConfig | OnlineEvalConfig, *, pool_name: str) -> EvalSeries:
    """Return the series of `env`. Values that `env` leaves unset come from `config`."""
    sampling = env.sampling.over(config.sampling)
    arguments = sampling_arguments(sampling, temperature=sampling.temperature)
    return EvalSeries(
        name=env.label,
        env=env,
        pool_name=pool_name,
        interval=env.interval or config.interval,
        num_examples=config.num_examples if env.num_examples is None else env.num_examples,
        rollouts_per_example=env.rollouts_per_example or config.rollouts_per_example,
        sampling=lambda step: arguments,
        skip_first=env.skip_first,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Evaluates series on the policy that the servers serve, in the workers of the pool."""

    pool: EnvironmentPool
    servers: PlacementServers
    layout: RunLayout
    max_concurrent: int
    """The most rollouts in flight."""
    retry: EvalRetryConfig = field(default_factory=lambda: EvalRetryConfig(max_attempts=1))
    """How often a failed example is repeated; by default never."""
    has_versions: bool = True
    """The servers report which policy sampled each token."""

    async def evaluate(
        self,
        series: Sequence[EvalSeries],
        *,
        step: int,
        digest: str,
        earlier: EarlierResults,
        on_start: Callable[[EvalSeries, int], Callable[[], None]] = lambda series, total: lambda: None,
    ) -> list[Summary]:
        """Evaluate the series at the same time and write their results; return the scores in the order of `series`.

        Args:
            step: version of the policy that the servers serve.
            digest: digest of its weights.
            earlier: how to treat results that exist already.
            on_start: called with each series and its number of examples. It returns a function that is called after each example.

        Raises:
            ConfigError: nothing is left to evaluate, or the results to continue are of another evaluation.
            ExceptionGroup: an example failed, and `retry.reraise` is set.
        """
        infos = self.pool.infos
        all_series = series
        tasks = [series.make_task(infos[series.pool_name], step=step, digest=digest) for series in all_series]
        # The examples of all series share the slots. A slot is a group of the largest size.
        slots = asyncio.Semaphore(max(self.max_concurrent // max(task.rollouts_per_example for task in tasks), 1))
        async with asyncio.TaskGroup() as running:
            evaluations = [
                running.create_task(
                    self._evaluate(series, task, slots, earlier, on_start(series, task.num_examples)),
                    name=f"eval-{series.name}",
                )
                for series, task in zip(all_series, tasks, strict=True)
            ]
        return [evaluation.result() for evaluation in evaluations]

    async def _evaluate(
        self,
        series: EvalSeries,
        task: TaskRecord,
        slots: asyncio.Semaphore,
        earlier: EarlierResults,
        on_progress: Callable[[], None],
    ) -> Summary:
        """Evaluate the examples of one task that have no results yet; write the summary and return it."""
        started = time.monotonic()
        directory = self.layout.evals_step(task.step, series.name)
        results = ResultsFile(directory, task, earlier)
        errors: dict[int, str] = {}

        async def run_example(example_id: int) -> None:
            request = GroupRequest(
                group_id=GroupId(-1 - example_id),  # seeds are derived from it; a run's own groups have ids from 0 on
                env=series.pool_name,
                split=task.split,
                example_id=example_id,
                num_rollouts=task.rollouts_per_example,
                base_url="",  # set when a server is picked
                sampling=task.sampling,
            )
            async with slots:
                try:
                    rollouts = await self._run_with_retries(request, PolicyVersion(task.step))
                except Exception as exc:  # user code may raise anything: only this example fails
                    if self.retry.reraise:
                        raise
                    errors[example_id] = f"{type(exc).__name__}: {exc}"
                    logger.warning("example failed env=%s example=%s: %s", task.env, example_id, exc)
                else:
                    results.add(example_id, rollouts)
            on_progress()

        try:
            if (summary := read_summary(directory)) is not None and not summary.num_failed:
                return summary
            async with asyncio.TaskGroup() as examples:
                for example_id in range(task.first_example, task.first_example + task.num_examples):
                    if example_id in results.finished:
                        on_progress()
                    else:
                        examples.create_task(run_example(example_id), name=f"eval-{task.env}-{example_id}")
            summary = _summarize(task, results.finished, errors=errors, seconds=time.monotonic() - started)
            await asyncio.to_thread(results.finish, summary)
            return summary
        finally:
            results.close()

    async def _run_with_retries(self, request: GroupRequest, version: PolicyVersion) -> list[Rollout]:
        """Run a group, and again after a failure as `retry` allows; raises as `_run_on_least_loaded`."""
        for attempt in range(1, self.retry.max_attempts):
            try:
                return await self._run_on_least_loaded(request, version)
            except (RolloutFailed, WorkerLost) as exc:
                pause = self.retry.pause_s(attempt)
                logger.warning(
                    "example failed env=%s example=%s attempt=%s of %s, again in %.1f s: %s",
                    *(request.env, request.example_id, attempt, self.retry.max_attempts, pause, exc),
                )
                await asyncio.sleep(pause)
        return await self._run_on_least_loaded(request, version)

    async def _run_on_least_loaded(self, request: GroupRequest, version: PolicyVersion) -> list[Rollout]:
        """Run on the least loaded server. If that server or its worker is lost, retry on another.

        Raises:
            RolloutFailed: the group failed on a server that answers, or its worker was lost too often.
            WorkerLost: every attempt lost its server or its worker.
        """
        last_error: Exception | None = None
        for _ in range(_MAX_SERVER_ATTEMPTS):
            while (server := self.servers.pick(num_rollouts=request.num_rollouts)) is None:  # noqa: ASYNC110  servers are polled
                await asyncio.sleep(_POLL_INTERVAL_S)
            try:
                rollouts = await self.pool.run_group(msgspec.structs.replace(request, base_url=server))
                runs = [run for rollout in rollouts for sample in rollout.samples for run in sample.versions]
                if not self.has_versions or all(run.version == version for run in runs):
                    return rollouts
                last_error = WorkerLost(f"the server {server} answered with another policy than {version}: it was restarted")
            except WorkerLost as exc:
                last_error = exc
            except RolloutFailed as exc:
                if not await self.servers.is_at_fault(server):
                    raise
                last_error = exc
            finally:
                self.servers.release(server, num_rollouts=request.num_rollouts)
        assert last_error is not None
        raise last_error


def _summarize(
    task: TaskRecord, finished: Mapping[int, Sequence[ResultRecord]], *, errors: Mapping[int, str], seconds: float
) -> Summary:
    """Compute the scores of a task from the results of finished examples and the errors of failed ones, both by example id."""
    groups = [finished[example_id] for example_id in sorted(finished)]  # float sums depend on the order
    records = [record for group in groups for record in group]
    rewards = [[record.reward for record in group] for group in groups]
    average = mean_over_examples([float(np.mean(group)) for group in rewards]) if rewards else None
    passed = pass_at(rewards) if rewards else {}
    names = sorted({name for record in records for name in record.scores})
    return Summary(
        env=task.env,
        step=task.step,
        digest=task.digest,
        num_examples=task.num_examples,
        rollouts_per_example=task.rollouts_per_example,
        num_failed=task.num_examples - len(groups),
        first_error=errors[min(errors)] if errors else None,
        avg=average.value if average else None,
        ci95=average.ci95 if average else None,
        pass_at_k=passed[str(task.rollouts_per_example)].value if passed else None,
        pass_at=passed,
        truncated=float(np.mean([record.is_truncated for record in records])) if records else None,
        completion_tokens=sum(record.completion_tokens for record in records),
        scores={name: float(np.mean([record.scores[name] for record in records if name in record.scores])) for name in names},
        seconds=seconds,
    )
