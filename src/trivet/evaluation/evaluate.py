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
from trivet.environments.port import EnvironmentPool
from trivet.environments.sampling import sampling_arguments
from trivet.evaluation.scores import Summary, average
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
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
    pool: EnvironmentPool,
    env: str,
    *,
    base_url: str,
    step: int,
    digest: str,
    layout: RunLayout,
    on_progress: Callable[[], None] = lambda: None,
) -> Summary:
    """Run the examples of `env` that `config` asks for and write the results.

    Args:
        base_url: of the server to ask.
        step: version of the policy that the server holds.
    """
    started = time.monotonic()
    split, num_examples = choose_examples(pool.infos[env], num_examples=config.num_examples)
    sampling = sampling_arguments(config.sampling, temperature=config.sampling.temperature)
    slots = asyncio.Semaphore(max(config.max_concurrent // config.rollouts_per_example, 1))

    async def run_example(index: int) -> list[Rollout] | None:
        async with slots:
            try:
                return await pool.run_group(
                    GroupRequest(
                        group_id=GroupId(index),
                        env=env,
                        split=split,
                        example_id=index,
                        num_rollouts=config.rollouts_per_example,
                        base_url=base_url,
                        sampling=sampling,
                    )
                )
            except Exception as exc:  # noqa: BLE001  an environment is the user's code: what it raises costs this example only
                logger.warning("example failed env=%s example=%s: %s", env, index, exc)
                return None
            finally:
                on_progress()

    groups = await asyncio.gather(*(run_example(index) for index in range(num_examples)))
    finished = [(index, group) for index, group in enumerate(groups) if group is not None]
    rollouts = [rollout for _, group in finished for rollout in group]
    avg, ci95, pass_at_k = average([[rollout.reward for rollout in group] for _, group in finished])
    summary = Summary(
        env=env,
        step=step,
        digest=digest,
        num_examples=num_examples,
        rollouts_per_example=config.rollouts_per_example,
        num_failed=len(groups) - len(finished),
        avg=avg,
        ci95=ci95,
        pass_at_k=pass_at_k,
        truncated=sum(rollout.is_truncated for rollout in rollouts) / len(rollouts) if rollouts else None,
        completion_tokens=sum(sample.num_loss_tokens for rollout in rollouts for sample in rollout.samples),
        seconds=time.monotonic() - started,
    )
    _write(layout.evals_step(step, env), finished, summary)
    return summary


def choose_examples(info: EnvironmentInfo, *, num_examples: int) -> tuple[Split, int]:
    """The split to measure on and how many of its first examples: its own evaluation data, else what it trains on.

    Args:
        num_examples: at most; -1 is all.
    """
    split, available = (Split.EVAL, info.num_eval_examples) if info.num_eval_examples else (Split.TRAIN, info.num_examples)
    return split, available if num_examples < 0 else min(num_examples, available)


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
