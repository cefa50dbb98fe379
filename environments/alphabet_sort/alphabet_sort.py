"""Sort names, then sort more names into the list, over several turns.

Names are drawn from a seed. Every turn names only what it adds, so a model must remember the list of the turns before.
"""

import random
from collections.abc import Set
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Any, Literal

import verifiers as vf
from datasets import Dataset

_FIRST_NAMES = """
Ada Boris Carla Dmitri Elena Farid Greta Hugo Ines Jakob Keiko Lars Mina Nikolai Olga Pablo Quentin Rosa Sven Tara
Ulrich Vera Walid Xenia Yusuf Zora Anton Bella Cyrus Daria Emil Fatima Goran Hanna Igor Julia Karim Leila Marco Nadia
Oscar Petra Ravi Selma Tomas Ursula Viktor Wanda Yara Zeno
"""
_LAST_NAMES = """
Abbott Becker Castillo Dalton Eriksen Fischer Garcia Hoffman Ivanov Jensen Keller Lindqvist Moreau Nakamura Okafor
Petrov Quispe Rossi Santos Tanaka Underwood Vasquez Weber Xu Yamada Zimmer Andersson Bianchi Costa Dubois Evans Ferrari
Gruber Haddad Ito Johansson Kowalski Larsen Meyer Novak Olsen Park Rahman Silva Torres Unger Virtanen Wagner Young Zhou
"""
FIRST_NAMES, LAST_NAMES = _FIRST_NAMES.split(), _LAST_NAMES.split()
NEW = " // new"

Key = Literal["first", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A first and a last name, written without a space."""

    first: str
    last: str

    def __str__(self) -> str:
        return f"{self.first}{self.last}"


def draw_turns(generator: random.Random, counts: list[int]) -> list[list[Name]]:
    """Draw the names that each turn adds. No first or last name appears twice, so there is only one right order."""
    total = sum(counts)
    drawn = zip(generator.sample(FIRST_NAMES, total), generator.sample(LAST_NAMES, total), strict=True)
    names = [Name(first=first, last=last) for first, last in drawn]
    starts = [sum(counts[:turn]) for turn in range(len(counts))]
    return [names[start : start + count] for start, count in zip(starts, counts, strict=True)]


def expected_answers(turns: list[list[Name]], *, key: Key) -> list[list[str]]:
    """Return the right lines of each turn: all names so far, in order; from the second turn on, new names are marked."""
    answers = []
    for turn in range(len(turns)):
        known = [name for added in turns[: turn + 1] for name in added]
        in_order = sorted(known, key=lambda name: getattr(name, key))
        answers.append([f"{name}{NEW if turn and name in turns[turn] else ''}" for name in in_order])
    return answers


def make_prompts(turns: list[list[Name]], *, key: Key) -> list[str]:
    """Return the user's message of each turn."""
    listed = ["\n".join(map(str, added)) for added in turns]
    first = (
        f"Sort these names by {key} name, in alphabetical order. Answer in <sorted> tags, one name per line:\n"
        f"<sorted>\nName1\nName2\n</sorted>\n\n{listed[0]}"
    )
    later = [
        f"Now sort these names into the list too, and mark each of them with '{NEW.strip()}'. "
        f"Answer with the whole list in <sorted> tags:\n<sorted>\nName1\nName2{NEW}\n</sorted>\n\n{names}"
        for names in listed[1:]
    ]
    return [first, *later]


def make_examples(
    count: int,
    *,
    num_turns: tuple[int, int],
    names_per_turn: tuple[int, int],
    seed: str,
    key: Key | None,
    exclude: Set[str] = frozenset(),
) -> list[dict[str, Any]]:
    """Make the examples of a data set; the result depends on the arguments alone.

    Args:
        exclude: questions that must not appear.
    """
    generator = random.Random(seed)
    examples: list[dict[str, Any]] = []
    while len(examples) < count:
        counts = [generator.randint(*names_per_turn) for _ in range(generator.randint(*num_turns))]
        example_key: Key = key or generator.choice(("first", "last"))
        turns = draw_turns(generator, counts)
        prompts, answers = make_prompts(turns, key=example_key), expected_answers(turns, key=example_key)
        if prompts[0] not in exclude:
            info = {"follow_ups": prompts[1:], "expected": ["\n".join(lines) for lines in answers]}
            examples.append({"question": prompts[0], "answer": info["expected"][-1], "info": info})
    return examples


def similarity(given: str, expected: str) -> float:
    """Return how similar two lists are: 1 when they are equal line by line, blanks around lines aside."""
    lines = [line.strip() for line in given.splitlines() if line.strip()]
    return SequenceMatcher(None, "\n".join(lines), expected, autojunk=False).ratio()


class AlphabetSortEnv(vf.MultiTurnEnv):
    """Runs as many turns as `info["expected"]` has answers."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        """Ask for the names of the next turn."""
        return [vf.UserMessage(content=state["info"]["follow_ups"][len(state["trajectory"]) - 1])]

    @vf.stop
    async def is_sorted_out(self, state: vf.State) -> bool:
        """End after the last turn."""
        return len(state["trajectory"]) >= len(state["info"]["expected"])


def make_rubric(parser: vf.XMLParser, *, similarity_power: int, power_per_turn: bool) -> vf.Rubric:
    """Make the rubric; see `load_environment` for its arguments."""

    def sorted_reward(completion: vf.Messages, info: dict[str, Any]) -> float:
        """Return the similarity of each turn's list to the right one, over all turns; a missing turn counts 0."""
        answers = [parser.parse_answer([message]) or "" for message in parser.get_assistant_messages(completion)]
        answers += [""] * (len(info["expected"]) - len(answers))
        turns = [similarity(given, right) for given, right in zip(answers, info["expected"], strict=True)]
        if power_per_turn:
            return sum(turn**similarity_power for turn in turns) / len(turns)
        return (sum(turns) / len(turns)) ** similarity_power

    return vf.Rubric(funcs=[sorted_reward], parser=parser)


def load_environment(
    num_examples: int = 2000,
    num_eval_examples: int = 200,
    min_turns: int = 1,
    max_turns: int = 3,
    min_names_per_turn: int = 1,
    max_names_per_turn: int = 5,
    key: Key | None = None,
    similarity_power: int = 4,
    power_per_turn: bool = True,
    seed: int = 0,
) -> vf.Environment:
    """Return a multi-turn environment over drawn names. No first question is both in the evaluation set and in the training set.

    Args:
        key: sort by this name in every example; None: by either.
        similarity_power: makes small mistakes cost more: a list that is 0.9 alike scores 0.9 ** similarity_power.
        power_per_turn: False takes the power of the mean over the turns instead.
        seed: another seed gives other examples.

    Raises:
        ValueError: the limits contradict each other, or ask for more distinct names than there are.
    """
    for low, high, name in ((min_turns, max_turns, "turns"), (min_names_per_turn, max_names_per_turn, "names_per_turn")):
        if not 1 <= low <= high:
            raise ValueError(f"min_{name} ({low}) must be >= 1 and at most max_{name} ({high})")
    if max_turns * max_names_per_turn > len(FIRST_NAMES):
        raise ValueError(
            f"max_turns * max_names_per_turn = {max_turns} * {max_names_per_turn} names, but there are {len(FIRST_NAMES)}; "
            "lower one of them"
        )
    make = partial(
        make_examples, num_turns=(min_turns, max_turns), names_per_turn=(min_names_per_turn, max_names_per_turn), key=key
    )
    held_out = make(num_eval_examples, seed=f"{seed}/eval")
    examples = make(num_examples, seed=f"{seed}/train", exclude={example["question"] for example in held_out})
    parser = vf.XMLParser(fields=["sorted"], answer_field="sorted")
    return AlphabetSortEnv(
        dataset=Dataset.from_list(examples),
        eval_dataset=Dataset.from_list(held_out),
        parser=parser,
        rubric=make_rubric(parser, similarity_power=similarity_power, power_per_turn=power_per_turn),
        max_turns=max_turns,
    )
