"""Runs environments on one policy and writes what came out: evals/step_N/<env>/results.jsonl and summary.json."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from trivet.config.evaluation import EvalConfig
from trivet.config.layout import RunLayout
from trivet.environments.model_client import ModelClient
from trivet.environments.runner import GroupRunner
from trivet.evaluation.scores import Summary, average
from trivet.wire.rollouts import GroupId, Rollout

logger = logging.getLogger(__name__)


class ResultRecord(msgspec.Struct, kw_only=True):
    """One line of results.jsonl."""

    example_id: int
    index: int
    reward: float
    scores: dict[str, float]
    num_turns: int
    is_truncated: bool
    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]


async def evaluate(
    config: EvalConfig,
    runner: GroupRunner,
    dataset: Any,
    *,
    client: ModelClient,
    step: int,
    digest: str,
    layout: RunLayout,
    on_progress: Callable[[], None] = lambda: None,
) -> Summary:
    """Run every example of `dataset` and write the results.

    Args:
        dataset: rows as verifiers prepares them.
        step: version of the policy that the server holds.
    """
    started = time.monotonic()
    slots = asyncio.Semaphore(max(config.max_concurrent // config.rollouts_per_example, 1))

    async def run_example(index: int) -> list[Rollout] | None:
        async with slots:
            try:
                return await runner.run(
                    dataset[index], group_id=GroupId(index), num_rollouts=config.rollouts_per_example, client=client
                )
            except Exception as exc:  # noqa: BLE001  an environment is the user's code: what it raises costs this example only
                logger.warning("example failed env=%s example=%s: %s", runner.label, index, exc)
                return None
            finally:
                on_progress()

    groups = await asyncio.gather(*(run_example(index) for index in range(len(dataset))))
    finished = [(index, group) for index, group in enumerate(groups) if group is not None]
    rollouts = [rollout for _, group in finished for rollout in group]
    avg, ci95, pass_at_k = average([[rollout.reward for rollout in group] for _, group in finished])
    summary = Summary(
        env=runner.label,
        step=step,
        digest=digest,
        num_examples=len(dataset),
        rollouts_per_example=config.rollouts_per_example,
        num_failed=len(groups) - len(finished),
        avg=avg,
        ci95=ci95,
        pass_at_k=pass_at_k,
        truncated=sum(rollout.is_truncated for rollout in rollouts) / len(rollouts) if rollouts else None,
        completion_tokens=sum(sample.num_loss_tokens for rollout in rollouts for sample in rollout.samples),
        seconds=time.monotonic() - started,
    )
    _write(layout.evals_step(step, runner.label), finished, summary)
    return summary


def _write(directory: Path, finished: list[tuple[int, list[Rollout]]], summary: Summary) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "results.jsonl").open("wb") as file:
        for example_id, group in finished:
            for rollout in group:
                record = ResultRecord(
                    example_id=example_id,
                    index=rollout.index,
                    reward=rollout.reward,
                    scores=rollout.scores,
                    num_turns=rollout.num_turns,
                    is_truncated=rollout.is_truncated,
                    prompt=rollout.prompt,
                    completion=rollout.completion,
                )
                file.write(msgspec.json.encode(record) + b"\n")
    (directory / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2))
