"""Evaluates one policy on the examples of one environment. Called by `eval`, and by the orchestrator during a run."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from trivet.config.schema.environment import EnvConfig
from trivet.errors import ConfigError, RolloutFailed, WorkerLost
from trivet.evaluation.placement import RunOnServer
from trivet.evaluation.results import ResultRecord, ResultsFile, TaskRecord, read_summary
from trivet.evaluation.scores import Summary, mean_over_examples, pass_at
from trivet.wire.groups import EnvironmentInfo, GroupRequest, SamplingArguments, Split
from trivet.wire.rollouts import GroupId, Rollout

logger = logging.getLogger(__name__)


def make_task(
    env: EnvConfig,
    info: EnvironmentInfo,
    *,
    step: int,
    digest: str,
    num_examples: int,
    rollouts_per_example: int,
    sampling: SamplingArguments,
    skip_first: int = 0,
) -> TaskRecord:
    """Return the task that evaluates `env`.

    Args:
        num_examples: at most; -1 is all. They come from the environment's evaluation data, or from what it trains on where
            it has none of its own, as in verifiers.
        digest: the digest of the policy of `step`.

    Raises:
        ConfigError: nothing is left to evaluate.
    """
    split, available = (Split.EVAL, info.num_eval_examples) if info.num_eval_examples else (Split.TRAIN, info.num_examples)
    left = available - skip_first
    if left <= 0:
        raise ConfigError(
            f"environment {env.label!r} has nothing to evaluate on: {available} examples, skip_first = {skip_first}; "
            "check its args, lower skip_first, or take it out"
        )
    return TaskRecord(
        env=env.label,
        env_id=env.package,
        env_args=env.args,
        split=split,
        step=step,
        digest=digest,
        first_example=skip_first,
        num_examples=left if num_examples < 0 else min(num_examples, left),
        rollouts_per_example=rollouts_per_example,
        sampling=sampling,
        data_digest=info.eval_digest if split is Split.EVAL else info.train_digest,
    )


def retry_failed_groups(
    run_group: RunOnServer,
    *,
    max_attempts: int,
    pause_s: Callable[[int], float],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> RunOnServer:
    """Return a `run_group` that retries a failed group.

    Args:
        max_attempts: attempts at a group, the first included.
        pause_s: returns the wait after attempt n, from 1, in seconds.
    """

    async def run(request: GroupRequest) -> list[Rollout]:
        for attempt in range(1, max_attempts):
            try:
                return await run_group(request)
            except (RolloutFailed, WorkerLost) as exc:
                pause = pause_s(attempt)
                logger.warning(
                    "example failed env=%s example=%s attempt=%s of %s, again in %.1f s: %s",
                    *(request.env, request.example_id, attempt, max_attempts, pause, exc),
                )
                await sleep(pause)
        return await run_group(request)

    return run


async def evaluate(
    task: TaskRecord,
    *,
    env: str,
    run_group: RunOnServer,
    slots: asyncio.Semaphore,
    directory: Path,
    does_continue: bool,
    does_reraise: bool = False,
    on_progress: Callable[[], None] = lambda: None,
) -> Summary:
    """Run the task, or what an earlier run of it left to do, and write the results.

    Args:
        env: the environment's name in requests.
        run_group: runs a group on a server that serves the policy of `task.step`.
        slots: limits the groups in flight; shared with other evaluations.
        directory: evals/step_N/<env>.
        does_continue: continue from the results in `directory`; examples that failed are run again.
        does_reraise: the first example that fails ends the evaluation with its error.
        on_progress: called after each example.
    """
    started = time.monotonic()
    results = ResultsFile(directory, task, does_continue=does_continue)
    if results.is_complete and (summary := read_summary(directory)) is not None and not summary.num_failed:
        results.close()
        return summary
    errors: dict[int, str] = {}

    async def run_example(example_id: int) -> None:
        async with slots:
            try:
                rollouts = await run_group(_request(task, example_id, env=env))
            except Exception as exc:  # an environment is the user's code: its error fails this example only
                if does_reraise:
                    raise
                errors[example_id] = f"{type(exc).__name__}: {exc}"
                logger.warning("example failed env=%s example=%s: %s", task.env, example_id, exc)
            else:
                results.add(example_id, rollouts)
        on_progress()

    try:
        async with asyncio.TaskGroup() as examples:
            for example_id in range(task.first_example, task.first_example + task.num_examples):
                if example_id in results.finished:
                    on_progress()
                else:
                    examples.create_task(run_example(example_id), name=f"eval-{task.env}-{example_id}")
        summary = _summarize(task, results.finished, errors=errors, seconds=time.monotonic() - started)
        await asyncio.to_thread(results.finish, summary)
    finally:
        results.close()
    return summary


def _request(task: TaskRecord, example_id: int, *, env: str) -> GroupRequest:
    return GroupRequest(
        group_id=GroupId(-1 - example_id),  # below 0, so that no group of a run has it: seeds are derived from it
        env=env,
        split=task.split,
        example_id=example_id,
        num_rollouts=task.rollouts_per_example,
        base_url="",  # `evaluation.placement` sets it
        sampling=task.sampling,
    )


def _summarize(
    task: TaskRecord, finished: Mapping[int, Sequence[ResultRecord]], *, errors: dict[int, str], seconds: float
) -> Summary:
    groups = [
        finished[example_id] for example_id in sorted(finished)
    ]  # not in the order they ended in: float sums depend on it
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
