"""One kind of task of reasoning-gym, drawn from a seed and scored by its own checks.

As a program it writes conversations with the right answers, so that `sft` can show a small model what an answer looks like. They
are drawn from another seed than what the environment trains on.

    uv run --no-project --with ./environments/reasoning_tasks python environments/reasoning_tasks/reasoning_tasks.py FILE.jsonl
        [--task spell_backward] [--settings JSON] [--examples 6400] [--seed 1]
"""

import argparse
import json
import random
import re
from pathlib import Path
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


def draw_tasks(task: str, count: int, *, seed: int, settings: dict[str, Any]) -> Any:
    """Return `count` tasks of one kind: a dataset of reasoning-gym.

    Raises:
        ValueError: reasoning-gym has no such task.
    """
    import reasoning_gym  # pyright: ignore[reportMissingImports]  in its own virtual environment; here, as it takes seconds

    # reasoning-gym draws its task i from seed + i: neighbouring seeds would give nearly the same tasks.
    first = random.Random(f"{seed}/reasoning-tasks").getrandbits(30)
    return reasoning_gym.create_dataset(task, size=count, seed=first, **settings)


def score_text(text: str, *, tasks: Any, place: int, partial_credit: bool) -> float:
    """Return the score of a completion for the task at `place`, 0 to 1; without `partial_credit` it is 0 or 1."""
    score = float(tasks.score_answer(final_answer(text), entry=tasks[place]))
    return score if partial_credit else float(score == 1.0)


def load_environment(
    task: str = "chain_sum",
    num_examples: int = 2000,
    num_eval_examples: int = 200,
    seed: int = 0,
    system_prompt: str | None = None,
    settings: dict[str, Any] | None = None,
    partial_credit: bool = True,
) -> vf.Environment:
    """Return a single-turn environment over tasks of one kind.

    Args:
        task: its name in reasoning-gym.
        num_examples, num_eval_examples: consecutive tasks of one sequence.
        seed: another seed gives another sequence.
        settings: keys of the task's own configuration.
        partial_credit: False rewards only right answers. Several tasks give nearly the whole reward to an answer that other text
            follows, and a policy learns to exploit that.

    Raises:
        ValueError: reasoning-gym has no such task.
    """
    tasks = draw_tasks(task, num_examples + num_eval_examples, seed=seed, settings=settings or {})
    rows = [
        {"question": entry["question"], "answer": str(entry["answer"]), "info": {"place": i}} for i, entry in enumerate(tasks)
    ]

    def correct_answer(completion: vf.Messages, info: dict[str, Any]) -> float:
        said = str(completion[-1]["content"] or "") if completion else ""
        return score_text(said, tasks=tasks, place=info["place"], partial_credit=partial_credit)

    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows[:num_examples]),
        eval_dataset=Dataset.from_list(rows[num_examples:]) if num_eval_examples else None,
        system_prompt=system_prompt,
        rubric=vf.Rubric(funcs=[correct_answer]),
    )


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--task", default="spell_backward")
    parser.add_argument("--settings", type=json.loads, default={}, help="keys of the task's own configuration, as JSON")
    parser.add_argument("--examples", type=int, default=6400)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.file.parent.mkdir(parents=True, exist_ok=True)
    with args.file.open("w", encoding="utf-8") as file:
        for entry in draw_tasks(args.task, args.examples, seed=args.seed, settings=args.settings):
            conversation = [
                {"role": "user", "content": entry["question"]},
                {"role": "assistant", "content": str(entry["answer"])},
            ]
            file.write(json.dumps({"messages": conversation}) + "\n")
    parser.exit(message=f"wrote {args.file}: {args.examples} conversations\n")


if __name__ == "__main__":
    main()
