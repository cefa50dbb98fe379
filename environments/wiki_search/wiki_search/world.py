"""An invented country and its encyclopedia: nothing in it can be known beforehand, so every answer must be looked up.

The world is a function of a fixed seed: articles and questions are the same everywhere.
"""

import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NAMES: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Article:
    """One article of the encyclopedia."""

    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question and the article with its answer."""

    text: str
    answer: str
    source: str
    """The title of the article with the answer."""
    num_steps: int
    """Articles that must be found: 2 when the question does not name the one with the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All articles, and the questions about them."""

    articles: list[Article]
    questions: list[Question]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Town:
    name: str
    river: str
    founded: int
    residents: int
    trade: str
    bridge_kind: str
    bridge_year: int


def make_world() -> World:
    """Make the world. It is the same at every call."""
    generator = random.Random("wiki-search/world")
    articles: list[Article] = []
    questions: list[Question] = []
    towns = {name: _draw_town(name, generator) for name in NAMES["towns"]}
    for town in towns.values():
        articles += [_describe_town(town), _describe_bridge(town)]
        questions += _ask_about_town(town)
    parts = (_people(towns, generator), _festivals(towns, generator), _rivers(towns, generator))
    for article, asked in (pair for part in parts for pair in part):
        articles.append(article)
        questions += asked
    return World(articles=articles, questions=questions)


def _draw_town(name: str, generator: random.Random) -> _Town:
    founded = generator.randint(900, 1650)
    return _Town(
        name=name,
        river=generator.choice(NAMES["rivers"]),
        founded=founded,
        residents=generator.randint(20, 900) * 100,
        trade=generator.choice(NAMES["trades"]),
        bridge_kind=generator.choice(NAMES["bridge_kinds"]),
        bridge_year=generator.randint(founded + 20, 1900),
    )


def _describe_town(town: _Town) -> Article:
    return Article(
        title=town.name,
        text=f"{town.name} is a town on the river {town.river}. It was founded in {town.founded} and has {town.residents:,} "
        f"residents. The town is known for its {town.trade}.",
    )


def _describe_bridge(town: _Town) -> Article:
    return Article(
        title=f"{town.name} Bridge",
        text=f"{town.name} Bridge is a {town.bridge_kind} bridge over the river {town.river}. It was opened in "
        f"{town.bridge_year} to replace a ferry.",
    )


def _ask_about_town(town: _Town) -> list[Question]:
    bridge = f"{town.name} Bridge"
    return [
        Question(text=f"In which year was {town.name} founded?", answer=str(town.founded), source=town.name, num_steps=1),
        Question(text=f"What is the town of {town.name} known for?", answer=town.trade, source=town.name, num_steps=1),
        Question(text=f"On which river does {town.name} lie?", answer=town.river, source=town.name, num_steps=1),
        Question(text=f"In which year was {bridge} opened?", answer=str(town.bridge_year), source=bridge, num_steps=1),
    ]


def _people(towns: dict[str, _Town], generator: random.Random) -> Iterator[tuple[Article, list[Question]]]:
    homes = generator.sample(NAMES["towns"], len(NAMES["people"]))
    for name, home in zip(NAMES["people"], homes, strict=True):
        town, profession, born = towns[home], generator.choice(NAMES["professions"]), generator.randint(1700, 1880)
        a = "an" if profession[0] in "aeiou" else "a"
        text = f"{name} was {a} {profession}, born in {home} in {born}. {name} died in {born + generator.randint(40, 85)}."
        article = Article(title=name, text=text)
        yield (
            article,
            [
                Question(text=f"In which town was {name} born?", answer=home, source=name, num_steps=1),
                Question(text=f"What was the profession of {name}?", answer=profession, source=name, num_steps=1),
                Question(
                    text=f"In which year was the birthplace of {name} founded?",
                    answer=str(town.founded),
                    source=home,
                    num_steps=2,
                ),
                Question(
                    text=f"What is the town where {name} was born known for?", answer=town.trade, source=home, num_steps=2
                ),
            ],
        )


def _festivals(towns: dict[str, _Town], generator: random.Random) -> Iterator[tuple[Article, list[Question]]]:
    for name, place in zip(NAMES["festivals"], generator.sample(NAMES["towns"], len(NAMES["festivals"])), strict=True):
        month, since = generator.choice(NAMES["months"]), generator.randint(1700, 1950)
        article = Article(title=name, text=f"{name} is a festival held in {place} every {month} since {since}.")
        yield (
            article,
            [
                Question(text=f"In which month is {name} held?", answer=month, source=name, num_steps=1),
                Question(
                    text=f"On which river lies the town that holds {name}?",
                    answer=towns[place].river,
                    source=place,
                    num_steps=2,
                ),
            ],
        )


def _rivers(towns: dict[str, _Town], generator: random.Random) -> Iterator[tuple[Article, list[Question]]]:
    for name in NAMES["rivers"]:
        length = generator.randint(60, 700)
        on_it = [town.name for town in towns.values() if town.river == name]
        listed = f" Towns on it: {', '.join(on_it)}." if on_it else ""
        article = Article(title=f"{name} (river)", text=f"The {name} is a river, {length} km long.{listed}")
        question = f"How long, in km, is the river {name}?"
        yield article, [Question(text=question, answer=str(length), source=article.title, num_steps=1)]
