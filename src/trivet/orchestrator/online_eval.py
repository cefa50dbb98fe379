"""Runs the evaluations during a run: decides which are due and on which policy, and writes their scores.

consumes: loaded policies
produces: evals/step_N/<env>/, metrics/eval.jsonl and Evaluate events
waits for: `changed`
unblocked by: a policy that was loaded; the end of training (`finish`)

While an evaluation runs, the servers keep the policy that it measures. Training continues as far as `max_async_level` allows.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from trivet.config.layout import RunLayout
from trivet.config.schema.environment import SamplingConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.port import EnvironmentPool
from trivet.environments.settings import sampling_arguments
from trivet.evaluation.evaluate import EvalSeries, Evaluator, make_series
from trivet.evaluation.results import EarlierResults, read_summary
from trivet.evaluation.scores import Summary, eval_metrics
from trivet.orchestrator.dispatcher import ChangeEvent
from trivet.orchestrator.policy import PolicyWatcher
from trivet.step_directories import list_steps
from trivet.telemetry.telemetry import Telemetry
from trivet.wire.events import Evaluate
from trivet.wire.groups import SamplingArguments
from trivet.wire.versions import START_VERSION, PolicyVersion

logger = logging.getLogger(__name__)

VAL = "val"
"""Directory of validations inside evals/step_N/."""
_IDLE_WAIT_S = 5.0
"""The evaluations check again at least this often, so that a missed notification costs seconds."""
DEFAULT_MAX_CONCURRENT = 64
"""Limit of rollouts of validations in flight in a run without `[orchestrator.eval]`, which would set `max_concurrent`."""


@dataclass(slots=True, kw_only=True)
class ScheduledSeries:
    """The evaluations of one environment during a run, and which of them is done."""

    series: EvalSeries
    is_val: bool
    """True for a validation (`[orchestrator.val]`), False for an evaluation (`[orchestrator.eval]`)."""
    last: PolicyVersion | None = None
    """The newest version that was evaluated; None when there is none yet."""

    def is_due(self, version: PolicyVersion, *, is_last: bool) -> bool:
        """Return whether a multiple of the interval was reached or passed since the last evaluation, or `version` is the last.

        When the servers skip a version that is a multiple, the next version that they serve is evaluated instead.
        """
        if self.last is None or is_last:
            return self.last != version
        return version // self.series.interval > self.last // self.series.interval


def _training_sampling(sampling: SamplingConfig, step: int, *, max_steps: int | None) -> SamplingArguments:
    """Return the arguments with which policy `step` samples for training: the temperature is that of the next step."""
    return sampling_arguments(sampling, temperature=sampling.temperature_at(step + 1, max_steps=max_steps))


def schedule_series(
    config: OrchestratorConfig, pool: EnvironmentPool, *, layout: RunLayout, resumed_from: PolicyVersion
) -> list[ScheduledSeries]:
    """Return the evaluations that `config` asks for. Results of earlier attempts count as done.

    If the policy of `resumed_from` is to be evaluated again, its results are removed.
    """
    evals, val = config.eval, config.val
    scheduled: list[ScheduledSeries] = []
    if evals is not None:
        eval_series = [make_series(env, evals, pool_name=config.pool_name(env)) for env in evals.env]
        scheduled += [ScheduledSeries(series=series, is_val=False) for series in eval_series]
    if val is not None:
        for env in config.env:
            series = EvalSeries(
                name=f"{VAL}/{env.label}",
                env=env,
                pool_name=env.label,
                interval=val.interval,
                num_examples=val.num_examples,
                rollouts_per_example=val.rollouts_per_example,
                sampling=partial(_training_sampling, env.sampling.over(config.sampling), max_steps=config.max_steps),
            )
            scheduled.append(ScheduledSeries(series=series, is_val=True))
    for entry in scheduled:
        name = entry.series.name
        # Raises now, and not at the first evaluation, when the environment has no example to evaluate on.
        entry.series.make_task(pool.infos[entry.series.pool_name], step=0, digest="")
        evaluated = [step for step in list_steps(layout.evals) if step <= resumed_from]
        complete = [step for step in evaluated if read_summary(layout.evals_step(step, name)) is not None]
        entry.last = PolicyVersion(max(complete)) if complete else None
        if entry.last is None and (entry.is_val or (evals is not None and not evals.eval_base_model)):
            # The start model is not evaluated. It counts as done, so the first multiple of the interval is due first.
            entry.last = START_VERSION
        elif evals is not None and not evals.skip_eval_on_resume and entry.last == resumed_from:
            entry.last = None
            shutil.rmtree(layout.evals_step(resumed_from, name), ignore_errors=True)
    return scheduled


class OnlineEval:
    """Evaluates the policies that are due, one after another."""

    def __init__(
        self,
        scheduled: Sequence[ScheduledSeries],
        *,
        evaluator: Evaluator,
        policy: PolicyWatcher,
        telemetry: Telemetry,
    ) -> None:
        """Subscribe to the policies that the servers serve.

        Args:
            policy: notifies of each served policy, and pins the one that an evaluation measures.
        """
        self._scheduled = list(scheduled)
        self._evaluator = evaluator
        self._policy = policy
        self._telemetry = telemetry
        self._final: PolicyVersion | None = None
        """The last policy of the run, once `finish` was called."""
        self._val_reward: dict[str, float] = {}
        """Metrics of validations that no training step has reported yet."""
        self.changed = ChangeEvent()
        """Notified when the servers serve a new policy, and by `finish`."""
        policy.subscribe(lambda version: self.changed.notify())

    async def run(self) -> None:
        """Evaluate until `finish` was called and the last policy is evaluated."""
        while True:
            version = self._policy.version
            is_last = self._final is not None and version >= self._final
            if due := [entry for entry in self._scheduled if entry.is_due(version, is_last=is_last)]:
                await self._evaluate(due)
            elif is_last:
                return
            else:
                await self.changed.wait(_IDLE_WAIT_S)

    def finish(self, version: PolicyVersion) -> None:
        """Declare `version` the last policy of the run: `run` evaluates it, whatever the interval, and returns."""
        self._final = version
        self.changed.notify()

    def take_val_metrics(self) -> dict[str, float]:
        """Return `val_reward/mean` and `val_reward/<env>` of a validation that ended since the last call."""
        values, self._val_reward = self._val_reward, {}
        return values

    async def _evaluate(self, due: Sequence[ScheduledSeries]) -> None:
        async with self._policy.pinned() as version:
            logger.info("evaluating version=%s envs=%s", version, ", ".join(entry.series.name for entry in due))
            summaries = await self._evaluator.evaluate(
                [entry.series for entry in due], step=version, digest=self._policy.digest, earlier=EarlierResults.CONTINUE
            )
        done = list(zip(due, summaries, strict=True))
        for entry, summary in done:
            entry.last = version
            name, digest, num_failed = entry.series.name, summary.digest, summary.num_failed
            self._telemetry.write_event(
                Evaluate(version=version, env=name, digest=digest, avg=summary.avg, num_failed=num_failed)
            )
        values = eval_metrics({entry.series.name: summary for entry, summary in done if not entry.is_val})
        val = val_metrics({entry.series.env.label: summary for entry, summary in done if entry.is_val})
        if self._final is None:
            self._val_reward |= val
        else:  # no training step follows that could report it
            values |= val
        if values:
            self._telemetry.write_eval(version, values)


def val_metrics(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """Return the mean reward over the scored examples of all environments, and over those of each environment."""
    scored = {env: summary for env, summary in summaries.items() if summary.avg is not None}
    if not scored:
        return {}
    counts = {env: summary.num_examples - summary.num_failed for env, summary in scored.items()}
    total = sum((summary.avg or 0.0) * counts[env] for env, summary in scored.items())
    by_env = {f"val_reward/{env}": summary.avg or 0.0 for env, summary in scored.items()}
    return {"val_reward/mean": total / sum(counts.values()), **by_env}
