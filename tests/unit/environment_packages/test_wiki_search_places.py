import random
from collections import Counter

import pytest

from support.scripted_policy import play, said, tool_call
from wiki_search import load_environment
from wiki_search.index import Index, words_of
from wiki_search.places import make_places

NUM_SEARCHED = 400
"""Questions of which the search is tried: all of them would take 10 s."""


@pytest.fixture(scope="module")
def world():
    return make_places()


@pytest.fixture(scope="module")
def index(world):
    return Index(world.articles)


@pytest.fixture(scope="module")
def env():
    return load_environment()


def test_the_encyclopedia_has_tens_of_thousands_of_articles_under_titles_of_their_own(world):
    assert len({article.title.lower() for article in world.articles}) == len(world.articles) == 19_291
    assert len({question.text for question in world.questions}) == len(world.questions) == 9_987


def test_every_answer_stands_in_the_article_that_is_named_as_its_source(world):
    articles = {article.title: set(words_of(article.text)) for article in world.articles}
    missing = [question for question in world.questions if not set(words_of(question.answer)) <= articles[question.source]]
    assert missing == []


def test_questions_that_need_further_articles_name_neither_the_source_nor_its_country(world):
    further = [question for question in world.questions if question.num_steps > 1]
    assert Counter(question.num_steps for question in further).keys() == {2, 3}
    assert len(further) > 4000
    named = [question for question in further if question.source in question.text]
    assert named == []


def test_a_search_for_the_subject_of_a_question_finds_its_article(world, index):
    one_step = [question for question in world.questions if question.num_steps == 1]
    asked = random.Random(0).sample(one_step, NUM_SEARCHED)
    found = [question.source in [article.title for article in index.search(question.text, limit=5)] for question in asked]
    assert sum(found) / len(found) > 0.95


def test_a_query_needs_no_accents(index):
    assert index.search("Zurich", limit=1)[0].title == "Zürich (Switzerland)"
    assert index.search("sao paulo", limit=1)[0].title == "São Paulo (Brazil)"


def test_a_question_of_three_steps_is_answered_by_way_of_the_country(env, world):
    question = next(question for question in world.questions if question.num_steps == 3)
    city = question.text.removeprefix("How many residents does the capital of the country where the city ").removesuffix(
        " lies have?"
    )
    calls = [tool_call("search", query=city), tool_call("read", title=question.source)]
    example = {**env.get_dataset()[0], "answer": question.answer, "info": {"source": question.source}}
    state = play(env, [*calls, f"<answer>{question.answer.replace(',', '')}</answer>"], example=example)
    found, text = said(state, "tool")
    assert any(title.startswith(f"{city} (") for title in found.splitlines())
    assert question.answer in text
    assert state["reward"] == pytest.approx(1.2)
