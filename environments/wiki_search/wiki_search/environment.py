"""Makes an environment of the encyclopedia with two tools: `search` finds titles, `read` shows an article."""

import json
import random
from collections.abc import Sequence

import verifiers as vf
from datasets import Dataset

from wiki_search.index import Index, words_of
from wiki_search.places import make_places
from wiki_search.world import Article, Question, make_world

_MIN_EVAL_QUESTIONS, _TRAIN_TO_EVAL = 40, 20
"""Questions that are kept for evaluation: one in so many, and at least so many."""
CORPORA = {"places": make_places, "invented": make_world}
"""The encyclopedias by the name that `corpus` takes."""

SYSTEM_PROMPT = (
    "Answer the question from the encyclopedia: search finds articles, read shows one. "
    "Give the final answer, as short as possible, in <answer> tags."
)


class Library:
    """The two tools. Their errors are texts for the model: a wrong title is its mistake, not the environment's."""

    def __init__(self, articles: Sequence[Article], *, num_results: int) -> None:
        self._index = Index(articles)
        self._by_title = {article.title.lower(): article for article in articles}
        self._num_results = num_results

    def search(self, query: str) -> str:
        """Search the encyclopedia; returns the titles of the best articles, one per line.

        Args:
            query: words to look for.
        """
        found = self._index.search(query, limit=self._num_results)
        return "\n".join(article.title for article in found) or "Nothing found."

    def read(self, title: str) -> str:
        """Read an article of the encyclopedia.

        Args:
            title: as the search returned it.
        """
        article = self._by_title.get(title.strip().lower())
        return article.text if article else f"There is no article {title[:80]!r}; search for one."


def answers_match(given: str, expected: str) -> bool:
    """Return whether two answers have equal words, whatever their case, punctuation and thousands separators."""
    given, expected = given.replace(",", ""), expected.replace(",", "")
    return words_of(given) == words_of(expected) != []


def titles_read(completion: vf.Messages) -> set[str]:
    """Return the titles, in lower case, that `read` was called with."""
    titles: set[str] = set()
    for message in completion:
        for call in message.get("tool_calls") or ():
            if call.name == "read":
                titles.add(_title_of(call.arguments).strip().lower())
    return titles


def _title_of(arguments: str) -> str:
    try:
        parsed = json.loads(arguments)
    except json.JSONDecodeError:
        return ""
    return str(parsed.get("title", "")) if isinstance(parsed, dict) else ""


def make_rubric(parser: vf.XMLParser) -> vf.Rubric:
    """Make the rubric: a right answer, and a little for finding its article."""

    def correct(completion: vf.Messages, answer: str) -> float:
        """Return 1 when the tagged answer has the words of the right one, else 0."""
        return float(answers_match(parser.parse_answer(completion) or "", answer))

    def found_source(completion: vf.Messages, info: dict[str, str]) -> float:
        """Return 1 when the article with the answer was read, else 0."""
        return float(info["source"].lower() in titles_read(completion))

    return vf.Rubric(funcs=[correct, found_source], weights=[1.0, 0.2], parser=parser)


def split_questions(questions: Sequence[Question], *, num_eval: int) -> tuple[list[Question], list[Question]]:
    """Split the questions into those to train on and those to evaluate on, in the same way for every seed of a run.

    Raises:
        ValueError: nothing is left to train on.
    """
    if not 1 <= num_eval < len(questions):
        raise ValueError(f"num_eval_questions ({num_eval}) must be >= 1 and below the number of questions ({len(questions)})")
    shuffled = list(questions)
    random.Random("wiki-search/split").shuffle(shuffled)
    return shuffled[num_eval:], shuffled[:num_eval]


def make_dataset(questions: Sequence[Question], count: int, *, seed: str) -> Dataset:
    """Return `count` of the questions in the order of `seed`; all of them for -1."""
    examples = [
        {"question": question.text, "answer": question.answer, "info": {"source": question.source}}
        for question in random.Random(seed).sample(questions, len(questions))
    ]
    return Dataset.from_list(examples if count < 0 else examples[:count])


def load_environment(
    corpus: str = "places",
    num_examples: int = -1,
    num_eval_examples: int = -1,
    num_eval_questions: int | None = None,
    max_turns: int = 8,
    num_results: int = 5,
    seed: int = 0,
    system_prompt: str = SYSTEM_PROMPT,
) -> vf.Environment:
    """Return a tool environment over the bundled encyclopedia. No evaluation question is ever trained on.

    Args:
        corpus: "places", the countries and cities of the world, or "invented", a small country that no model can know.
        num_examples, num_eval_examples: -1 takes all there are.
        num_eval_questions: questions that are kept for evaluation; None keeps a twentieth of "places" and 40 of "invented".
        max_turns: model turns in a rollout; a rollout also ends with the first turn that calls no tool.
        num_results: titles that a search returns at most.
        seed: another seed gives another order of questions.
    """
    if corpus not in CORPORA:
        raise ValueError(f"corpus must be one of {', '.join(map(repr, CORPORA))}, got {corpus!r}")
    world = CORPORA[corpus]()
    if num_eval_questions is None:
        num_eval_questions = max(_MIN_EVAL_QUESTIONS, len(world.questions) // _TRAIN_TO_EVAL)
    train, held_out = split_questions(world.questions, num_eval=num_eval_questions)
    library = Library(world.articles, num_results=num_results)
    parser = vf.XMLParser(fields=["answer"])
    return vf.ToolEnv(
        tools=[library.search, library.read],
        dataset=make_dataset(train, num_examples, seed=f"{seed}/train"),
        eval_dataset=make_dataset(held_out, num_eval_examples, seed=f"{seed}/eval"),
        system_prompt=system_prompt or None,
        parser=parser,
        rubric=make_rubric(parser),
        max_turns=max_turns,
    )
