"""Evaluations during a run: which are due, on which policy, and where their scores go.

Consumes loaded policies. Produces evals/step_N/<env>/, metrics/eval.jsonl and Evaluate events. Waits for its event, notified when a
policy is loaded or the last batch was sent. While it runs, the servers keep the policy that it measures; training goes on as
far as `max_async_level` lets it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EnvConfig, EvalSamplingConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.port import EnvironmentPool
from trivet.environments.sampling import sampling_arguments
from trivet.evaluation.evaluate import evaluate, make_task
from trivet.evaluation.placement import PlacementServers, RunOnServer, run_on_least_loaded
from trivet.evaluation.results import holds_task, read_summary
from trivet.evaluation.scores import Summary, eval_metrics
from trivet.orchestrator.change_event import ChangeEvent
from trivet.step_directories import discard_after, list_steps
from trivet.telemetry.telemetry import Telemetry
from trivet.wire.events import Evaluate
from trivet.wire.groups import EnvironmentInfo, SamplingArguments
from trivet.wire.versions import START_VERSION, PolicyVersion

logger = logging.getLogger(__name__)

VAL = "val"
"""Directory of validations inside evals/step_N/."""
_IDLE_WAIT_S = 5.0
"""The evaluations look again at least this often, so that a missed notification costs seconds."""
DEFAULT_MAX_CONCURRENT = 64
"""Rollouts of validations in flight, where `eval.max_concurrent` does not say."""


def is_due(version: PolicyVersion, *, last: PolicyVersion | None, interval: int) -> bool:
    """Return whether a multiple of `interval` was reached or passed since the evaluation of `last`.

    A policy that jumps over a multiple is evaluated at the version that it lands on.
    """
    return last is None or version // interval > last // interval


@dataclass(slots=True, kw_only=True)
class Series:
    """The evaluations of one environment over a run."""

    name: str
    """Directory inside evals/step_N/, and part of metric names."""
    env: EnvConfig
    info: EnvironmentInfo
    pool_name: str
    """Name of the environment in the pool."""
    interval: int
    num_examples: int
    rollouts_per_example: int
    skip_first: int
    sampling: Callable[[PolicyVersion], SamplingArguments]
    is_val: bool
    last: PolicyVersion | None = None
    """The newest version that was evaluated; None: none yet."""
    repeats: PolicyVersion | None = None
    """The version whose results on disk are made again."""


def make_series(
    config: OrchestratorConfig, pool: EnvironmentPool, *, layout: RunLayout, resumed_from: PolicyVersion
) -> list[Series]:
    """Return the evaluations that `config` asks for, those of earlier attempts counted as done.

    Raises:
        ConfigError: an environment has nothing to evaluate on.
    """
    series = [*_eval_series(config, pool), *_val_series(config, pool)]
    for one in series:
        make_task(  # refuses now what it would refuse at the first evaluation
            one.env,
            one.info,
            step=0,
            digest="",
            num_examples=one.num_examples,
            rollouts_per_example=one.rollouts_per_example,
            sampling=SamplingArguments(temperature=None),
            skip_first=one.skip_first,
        )
        one.last = _last_evaluated(layout, one.name, until=resumed_from)
        if one.last is None and (one.is_val or (config.eval is not None and not config.eval.eval_base_model)):
            one.last = START_VERSION  # which is left out, so the first multiple is the first to be due, resumed or not
        elif config.eval is not None and not config.eval.skip_eval_on_resume and one.last == resumed_from:
            one.last, one.repeats = None, resumed_from
    return series


def _eval_series(config: OrchestratorConfig, pool: EnvironmentPool) -> list[Series]:
    if config.eval is None:
        return []

    def sampling_of(env: EnvConfig, run: EvalSamplingConfig) -> Callable[[PolicyVersion], SamplingArguments]:
        """Return the sampling of `env`, the same for every version."""
        mine = env.sampling.over(run)
        arguments = sampling_arguments(mine, temperature=mine.temperature)
        return lambda version: arguments

    return [
        Series(
            name=env.label,
            env=env,
            info=pool.infos[config.pool_name(env)],
            pool_name=config.pool_name(env),
            interval=env.interval or config.eval.interval,
            num_examples=config.eval.num_examples if env.num_examples is None else env.num_examples,
            rollouts_per_example=env.rollouts_per_example or config.eval.rollouts_per_example,
            skip_first=env.skip_first,
            sampling=sampling_of(env, config.eval.sampling),
            is_val=False,
        )
        for env in config.eval.env
    ]


def _val_series(config: OrchestratorConfig, pool: EnvironmentPool) -> list[Series]:
    if config.val is None:
        return []

    def sampling_of(env: EnvConfig) -> Callable[[PolicyVersion], SamplingArguments]:
        """Return the sampling of `env` at the temperature of the version's step."""
        mine = env.sampling.over(config.sampling)
        return lambda version: sampling_arguments(
            mine, temperature=mine.temperature_at(version + 1, max_steps=config.max_steps)
        )

    return [
        Series(
            name=f"{VAL}/{env.label}",
            env=env,
            info=pool.infos[env.label],
            pool_name=env.label,
            interval=config.val.interval,
            num_examples=config.val.num_examples,
            rollouts_per_example=config.val.rollouts_per_example,
            skip_first=0,
            sampling=sampling_of(env),
            is_val=True,
        )
        for env in config.env
    ]


def _last_evaluated(layout: RunLayout, name: str, *, until: PolicyVersion) -> PolicyVersion | None:
    """The newest version, `until` at most, whose evaluation is complete on disk."""
    done = [
        step for step in list_steps(layout.evals) if step <= until and read_summary(layout.evals_step(step, name)) is not None
    ]
    return PolicyVersion(max(done)) if done else None


def discard_evals_after(layout: RunLayout, version: PolicyVersion) -> None:
    """Remove evaluations of later policies, which will be others when the run reaches them again."""
    discard_after(layout.evals, version)


class PinnablePolicy(Protocol):
    """The policy that the servers serve. Adapter: `orchestrator.policy.PolicyWatcher`."""

    version: PolicyVersion

    def pinned(self) -> AbstractAsyncContextManager[PolicyVersion]:
        """Keep the policy for the time of the block."""
        ...

    def subscribe(self, on_policy_served: Callable[[PolicyVersion], None]) -> None:
        """Call `on_policy_served` once the servers serve a new policy."""
        ...


class OnlineEval:
    """Evaluates the policies that are due, one after another."""

    def __init__(
        self,
        series: Sequence[Series],
        *,
        policy: PinnablePolicy,
        digest: Callable[[], str],
        run_group: RunOnServer,
        servers: PlacementServers,
        max_concurrent: int,
        layout: RunLayout,
        telemetry: Telemetry,
    ) -> None:
        """Subscribe to the policies that the servers serve.

        Args:
            digest: of the policy that the servers serve.
            run_group: runs it on the server named in the request.
            max_concurrent: rollouts in flight.
        """
        self._series = list(series)
        self._policy = policy
        self._digest = digest
        self._run_group = run_group
        self._servers = servers
        self._max_concurrent = max_concurrent
        self._layout = layout
        self._telemetry = telemetry
        self._final: PolicyVersion | None = None
        self._val_reward: dict[str, float] = {}
        self.changed = ChangeEvent()
        """Notified when the servers serve a new policy, and by `finish`."""
        policy.subscribe(lambda version: self.changed.notify())

    async def run(self) -> None:
        """Evaluate until `finish` was called and the last policy is evaluated."""
        while True:
            version = self._policy.version
            is_last = self._final is not None and version >= self._final
            due = [one for one in self._series if self._is_due(one, version, is_last=is_last)]
            if due:
                await self._evaluate(due)
            elif is_last:
                return
            else:
                await self.changed.wait(_IDLE_WAIT_S)

    def finish(self, version: PolicyVersion) -> None:
        """Evaluate `version`, after which none comes, whatever the interval, and end."""
        self._final = version
        self.changed.notify()

    def take_val_metrics(self) -> dict[str, float]:
        """`val_reward/mean` and `val_reward/<env>` of a validation that ended since the last call."""
        values, self._val_reward = self._val_reward, {}
        return values

    @staticmethod
    def _is_due(one: Series, version: PolicyVersion, *, is_last: bool) -> bool:
        if is_last:
            return one.last != version
        return is_due(version, last=one.last, interval=one.interval)

    async def _evaluate(self, due: Sequence[Series]) -> None:
        async with self._policy.pinned() as version:
            logger.info("evaluating version=%s envs=%s", version, ", ".join(one.name for one in due))
            largest_group = max(one.rollouts_per_example for one in due)
            slots = asyncio.Semaphore(max(self._max_concurrent // largest_group, 1))
            summaries = await asyncio.gather(*(self._evaluate_one(one, version, slots=slots) for one in due))
        for one, summary in zip(due, summaries, strict=True):
            one.last = version
            self._telemetry.write_event(
                Evaluate(version=version, env=one.name, digest=summary.digest, avg=summary.avg, num_failed=summary.num_failed)
            )
        values = eval_metrics({one.name: summary for one, summary in zip(due, summaries, strict=True) if not one.is_val})
        val = val_metrics({one.env.label: summary for one, summary in zip(due, summaries, strict=True) if one.is_val})
        if self._final is None:
            self._val_reward |= val
        else:  # no step comes that could report it
            values |= val
        if values:
            self._telemetry.write_eval(version, values)

    async def _evaluate_one(self, one: Series, version: PolicyVersion, *, slots: asyncio.Semaphore) -> Summary:
        task = make_task(
            one.env,
            one.info,
            step=version,
            digest=self._digest(),
            num_examples=one.num_examples,
            rollouts_per_example=one.rollouts_per_example,
            sampling=one.sampling(version),
            skip_first=one.skip_first,
        )
        directory = self._layout.evals_step(version, one.name)
        return await evaluate(
            task,
            env=one.pool_name,
            run_group=partial(run_on_least_loaded, run_group=self._run_group, servers=self._servers, version=version),
            slots=slots,
            directory=directory,
            does_continue=version != one.repeats and holds_task(directory, task),
        )


def val_metrics(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """Return the mean reward over the examples of all environments, and of each."""
    scored = {env: summary for env, summary in summaries.items() if summary.avg is not None}
    if not scored:
        return {}
    counts = {env: summary.num_examples - summary.num_failed for env, summary in scored.items()}
    total = sum((summary.avg or 0.0) * counts[env] for env, summary in scored.items())
    by_env = {f"val_reward/{env}": summary.avg or 0.0 for env, summary in scored.items()}
    return {"val_reward/mean": total / sum(counts.values()), **by_env}
