"""Reverse a short text: the task of the quickstart, and a model of what an environment package looks like.

Texts are generated from a seed, so nothing is downloaded, and no held-out text is ever trained on.
"""

import random
import re
import string
from collections.abc import Set
from difflib import SequenceMatcher

import verifiers as vf
from datasets import Dataset

TAGGED_PROMPT = "Reverse the text character by character. Put your answer in <reversed_text> tags."
PLAIN_PROMPT = "Reverse the text character by character. Answer with the reversed text alone."
_ANSWER = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


def make_texts(count: int, *, min_length: int, max_length: int, seed: str, exclude: Set[str] = frozenset()) -> list[str]:
    """Return distinct lowercase texts; the result depends on the arguments alone.

    Args:
        min_length, max_length: letters, both included; every length is equally likely.
        exclude: texts that must not appear.

    Raises:
        ValueError: the lengths allow too few texts to draw `count` distinct ones.
    """
    if not 1 <= min_length <= max_length:
        raise ValueError(f"min_length ({min_length}) must be >= 1 and at most max_length ({max_length})")
    possible = sum(26**length for length in range(min_length, max_length + 1))
    if 2 * (count + len(exclude)) > possible:
        raise ValueError(f"{count} distinct texts of {min_length} to {max_length} letters asked for; raise max_length")
    generator = random.Random(seed)
    texts: dict[str, None] = {}
    while len(texts) < count:
        length = generator.randint(min_length, max_length)
        text = "".join(generator.choices(string.ascii_lowercase, k=length))
        if text not in exclude:
            texts[text] = None
    return list(texts)


def held_out_texts(count: int, *, min_length: int, max_length: int, seed: int) -> list[str]:
    """Return the texts that a run with this seed is evaluated on. Nothing that makes training data may use them."""
    return make_texts(count, min_length=min_length, max_length=max_length, seed=f"{seed}/eval")


def similarity(answer: str, expected: str) -> float:
    """Return twice the matching characters over all characters: 1 when equal, 0 when nothing matches."""
    return SequenceMatcher(None, answer, expected, autojunk=False).ratio()


def extract_answer(completion: str) -> str | None:
    """Return the text in the first pair of tags; None without one."""
    match = _ANSWER.search(completion)
    return match.group(1).strip() if match else None


def last_text(completion: vf.Messages) -> str:
    """Return the text of the last message; empty without one."""
    return str(completion[-1]["content"] or "") if completion else ""


def reversal_reward(completion: vf.Messages, answer: str) -> float:
    """Return the similarity between the tagged answer and the true reversal; 0 without tags."""
    given = extract_answer(last_text(completion))
    return 0.0 if given is None else similarity(given, answer)


def plain_reversal_reward(completion: vf.Messages, answer: str) -> float:
    """Return the similarity between the whole completion and the true reversal: every needless word costs a little."""
    return similarity(last_text(completion).strip(), answer)


def make_dataset(texts: list[str]) -> Dataset:
    """Return a data set with a question and its answer for each text."""
    return Dataset.from_dict({"question": texts, "answer": [text[::-1] for text in texts]})


def load_environment(
    num_examples: int = 2000,
    num_eval_examples: int = 200,
    min_length: int = 5,
    max_length: int = 15,
    seed: int = 0,
    needs_tags: bool = True,
    system_prompt: str | None = None,
) -> vf.Environment:
    """Return a single-turn environment over generated texts. Its evaluation set shares no text with its training set.

    Args:
        min_length, max_length: letters of a text, both included.
        seed: another seed gives other texts.
        needs_tags: False scores the whole completion: a signal for models that never write the tags by themselves.
        system_prompt: None takes the one that fits `needs_tags`; "" leaves the system message out.
    """
    held_out = held_out_texts(num_eval_examples, min_length=min_length, max_length=max_length, seed=seed)
    texts = make_texts(
        num_examples, min_length=min_length, max_length=max_length, seed=f"{seed}/train", exclude=frozenset(held_out)
    )
    if system_prompt is None:
        system_prompt = TAGGED_PROMPT if needs_tags else PLAIN_PROMPT
    return vf.SingleTurnEnv(
        dataset=make_dataset(texts),
        eval_dataset=make_dataset(held_out),
        system_prompt=system_prompt or None,
        rubric=vf.Rubric(funcs=[reversal_reward if needs_tags else plain_reversal_reward]),
    )
