"""Writes directories of evaluations as `eval` and `vf-eval` leave them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from trivet.evaluation.results import ResultRecord
from trivet.evaluation.scores import Summary

ESCAPES = "\x1b[2J\x07[red]"
"""What a terminal would obey, and what a library of markup would read."""


def write_evaluation(
    run: Path, *, step: int, rewards: Sequence[Sequence[float]], env: str = "spelling", is_complete: bool = True
) -> Path:
    """Write the evaluation of a policy, with a list of rewards for each example. Return its directory."""
    directory = run / "evals" / f"step_{step}" / env
    directory.mkdir(parents=True)
    records = [
        result(example_id, index, reward, step=step)
        for example_id, of_example in enumerate(rewards)
        for index, reward in enumerate(of_example)
    ]
    (directory / "results.jsonl").write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    if is_complete:
        mean = sum(map(sum, rewards)) / max(1, sum(map(len, rewards)))
        (directory / "summary.json").write_bytes(msgspec.json.encode(summary(env, step, mean, rewards)))
    return directory


def result(example_id: int, index: int, reward: float, *, step: int) -> ResultRecord:
    said = f"policy {step} answers {reward:g}: {ESCAPES} question{example_id}.{index}\nsecond line"
    return ResultRecord(
        example_id=example_id,
        index=index,
        reward=reward,
        scores={"correct": reward},
        num_turns=1,
        is_truncated=example_id % 3 == 2,
        completion_tokens=5,
        prompt=[{"role": "user", "content": f"Spell question {example_id}."}],
        completion=[{"role": "assistant", "content": said}],
    )


def summary(env: str, step: int, mean: float, rewards: Sequence[Sequence[float]]) -> Summary:
    return Summary(
        env=env,
        step=step,
        digest="d",
        num_examples=len(rewards),
        rollouts_per_example=len(rewards[0]),
        num_failed=0,
        avg=mean,
        ci95=0.125,
        pass_at_k=0.75,
        truncated=0.0,
        completion_tokens=9,
        seconds=1.0,
    )


def write_vf_results(directory: Path, **metadata: Any) -> Path:
    """Write what `vf-eval --save-results` leaves."""
    directory.mkdir(parents=True)
    line = {
        "example_id": 0,
        "prompt": [],
        "completion": [{"role": "assistant", "content": "yes"}],
        "reward": 0.5,
        "metrics": {},
    }
    (directory / "results.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    known = {"env_id": "spelling", "model": "maker/model", "avg_reward": 0.5, "num_examples": 1, "rollouts_per_example": 1}
    (directory / "metadata.json").write_text(json.dumps(known | metadata), encoding="utf-8")
    return directory
