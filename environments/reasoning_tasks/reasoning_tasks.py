"""One kind of task of reasoning-gym, drawn from a seed and scored by its own checks."""

import random
import re
from typing import Any

import verifiers as vf
from datasets import Dataset

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def final_answer(text: str) -> str:
    """Return what stands in the last answer tags, else behind the last `=` or `:` of the last line, else that line."""
    if tagged := _TAGGED.findall(text):
        return tagged[-1].strip()
    lines = text.strip().splitlines() or [""]
    return re.split(r"[=:]", lines[-1])[-1].strip().rstrip(".").strip()


def load_environment(
    task: str = "chain_sum",
    num_examples: int = 2000,
    num_eval_examples: int = 200,
    seed: int = 0,
    system_prompt: str | None = None,
    settings: dict[str, Any] | None = None,
) -> vf.Environment:
    """Return a single-turn environment over tasks of one kind.

    Args:
        task: its name in reasoning-gym.
        num_examples, num_eval_examples: consecutive tasks of one sequence.
        seed: another seed gives another sequence.
        settings: keys of the task's own configuration.

    Raises:
        ValueError: reasoning-gym has no such task.
    """
    import reasoning_gym  # pyright: ignore[reportMissingImports]  in its own virtual environment; here, as it takes seconds

    # reasoning-gym draws its task i from seed + i: neighbouring seeds would give nearly the same tasks.
    first = random.Random(f"{seed}/reasoning-tasks").getrandbits(30)
    tasks = reasoning_gym.create_dataset(task, size=num_examples + num_eval_examples, seed=first, **(settings or {}))
    rows = [
        {"question": entry["question"], "answer": str(entry["answer"]), "info": {"place": i}} for i, entry in enumerate(tasks)
    ]

    def correct_answer(completion: vf.Messages, info: dict[str, Any]) -> float:
        said = str(completion[-1]["content"] or "") if completion else ""
        return float(tasks.score_answer(final_answer(said), entry=tasks[info["place"]]))

    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows[:num_examples]),
        eval_dataset=Dataset.from_list(rows[num_examples:]) if num_eval_examples else None,
        system_prompt=system_prompt,
        rubric=vf.Rubric(funcs=[correct_answer]),
    )
