"""Word problems with a number as answer, from a named data set or from the problems bundled here."""

import json
import logging
import os
import re
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset, load_dataset

logger = logging.getLogger(__name__)

SYSTEM_PROMPT = "Solve the problem step by step. Give the final answer, a number alone, in \\boxed{}."
BUNDLED = "bundled"
NUM_BUNDLED_EVAL = 12
"""The last of the bundled problems, which are kept for evaluation."""

MAX_ANSWER_CHARS = 40
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_ENDLESS = re.compile(r"\^|\*\*|!")


class LastingMathRubric(vf.MathRubric):
    """MathRubric that goes on when a process of its pool was killed.

    verifiers gives 0 to that answer and, since a broken pool takes no more work, to every answer after it.
    """

    async def correct_answer(self, parser: vf.Parser, completion: vf.Messages, answer: str, **kwargs: Any) -> float:
        """Return 1.0 for an answer that math-verify finds equal to the right one, else 0.0."""
        used = self.executor
        reward = await super().correct_answer(parser, completion, answer, **kwargs)
        if reward or not _is_broken(used):
            return reward
        if self.executor is used:  # of several answers that met the broken pool, the first replaces it
            logger.warning("a process that compares answers was killed: comparing again in another one")
            self.executor = ProcessPoolExecutor(max_workers=1)
        return await super().correct_answer(parser, completion, answer, **kwargs)


def _is_broken(executor: ProcessPoolExecutor) -> bool:
    try:
        executor.submit(int)
    except BrokenExecutor:
        return True
    return False


def bundled_problems() -> list[dict[str, str]]:
    """Return question, working (an arithmetic expression) and answer of every bundled problem."""
    text = Path(__file__).with_name("problems.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def final_answer(solution: str) -> str:
    """Return the number after `####` in a solution of the data set, without thousands separators.

    Raises:
        ValueError: there is none.
    """
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise ValueError(f"the solution has no final answer behind '####': {solution[-80:]!r}")
    return answer.strip().replace(",", "")


def extract_boxed(text: str) -> str:
    """Return the content of the last \\boxed{}, prepared for the comparison with a number; empty without one.

    Powers, factorials and long expressions become "": evaluating one could take for ever.
    """
    boxes = _BOXED.findall(text)
    answer = boxes[-1].replace("\\$", "").replace("$", "").replace(",", "").strip() if boxes else ""
    return "" if len(answer) > MAX_ANSWER_CHARS or _ENDLESS.search(answer) else answer


def load_split(name: str, split: str) -> Dataset:
    """Return question and answer of every problem.

    Raises:
        ValueError: the data set cannot be loaded; the message says what to do.
    """
    if name == BUNDLED:
        problems = bundled_problems()
        problems = problems[:-NUM_BUNDLED_EVAL] if split == "train" else problems[-NUM_BUNDLED_EVAL:]
        return Dataset.from_list([{"question": problem["question"], "answer": problem["answer"]} for problem in problems])
    try:
        loaded = load_dataset(name, "main", split=split)
    except (OSError, ValueError) as exc:
        if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
            logger.warning("%s is not in the cache and HF_HUB_OFFLINE is set: using the bundled problems for %s", name, split)
            return load_split(BUNDLED, split)
        raise ValueError(
            f"the data set {name!r} could not be loaded ({type(exc).__name__}: {exc}); set args = "
            f'{{ dataset = "{BUNDLED}" }} for the problems that come with this package, or HF_HUB_OFFLINE=1 to work off-line'
        ) from exc
    return loaded.map(lambda problem: {"answer": final_answer(problem["answer"])})


def choose(problems: Dataset, count: int, *, seed: int) -> Dataset:
    """Return `count` problems in the order of `seed`; all of them for -1."""
    shuffled = problems.shuffle(seed=seed)
    return shuffled if count < 0 else shuffled.select(range(min(count, len(shuffled))))


def load_environment(
    dataset: str = "openai/gsm8k",
    num_examples: int = -1,
    num_eval_examples: int = -1,
    seed: int = 0,
    system_prompt: str = SYSTEM_PROMPT,
) -> vf.Environment:
    """Return a single-turn environment; the reward is 1 for an answer that math-verify finds equal to the right one.

    Args:
        dataset: name of a data set of GSM8K's form on the hub, or "bundled". With HF_HUB_OFFLINE set, a data set that is not in
            the cache is replaced by the bundled one, with a warning.
        num_examples, num_eval_examples: -1 takes all there are.
        seed: of the order of problems, and of the choice where not all are taken.
    """
    parser = vf.MaybeThinkParser(extract_fn=extract_boxed)
    return vf.SingleTurnEnv(
        dataset=choose(load_split(dataset, "train"), num_examples, seed=seed),
        eval_dataset=choose(load_split(dataset, "test"), num_eval_examples, seed=seed),
        system_prompt=system_prompt or None,
        parser=parser,
        rubric=LastingMathRubric(parser=parser),
    )
