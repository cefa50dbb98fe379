import math
import random

import pytest

from support.scripted_policy import play, said, tool_call
from wiki_search import load_environment
from wiki_search.environment import Library, answers_match, titles_read
from wiki_search.index import Index, words_of
from wiki_search.places import make_places
from wiki_search.world import Article, make_world

NUM_SEARCHED = 400
"""Questions of which the search is tried: all of those about places would take 10 s."""


@pytest.fixture(scope="module")
def invented():
    return make_world()


@pytest.fixture(scope="module")
def places():
    return make_places()


@pytest.fixture(scope="module", params=["invented", "places"])
def world(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def index(world):
    return Index(world.articles)


@pytest.fixture(scope="module")
def env():
    return load_environment(corpus="invented")


def test_titles_and_questions_are_distinct(world):
    assert len({article.title.lower() for article in world.articles}) == len(world.articles)
    assert len({question.text for question in world.questions}) == len(world.questions)


def test_every_answer_stands_in_the_article_that_is_named_as_its_source(world):
    articles = {article.title: set(words_of(article.text)) for article in world.articles}
    missing = [question for question in world.questions if not set(words_of(question.answer)) <= articles[question.source]]
    assert missing == []


def test_questions_that_need_further_articles_do_not_name_their_source(world):
    further = [question for question in world.questions if question.num_steps > 1]
    assert len(further) >= 50
    assert not [question for question in further if question.source in question.text]


def test_a_search_for_the_subject_of_a_question_finds_its_article(world, index):
    one_step = [question for question in world.questions if question.num_steps == 1]
    asked = random.Random(0).sample(one_step, min(NUM_SEARCHED, len(one_step)))
    found = [question.source in [article.title for article in index.search(question.text, limit=5)] for question in asked]
    assert sum(found) / len(found) > 0.95


def test_the_places_are_as_many_as_the_documents_say_and_a_query_needs_no_accents(places):
    assert (len(places.articles), len(places.questions)) == (19_291, 9_987)
    index = Index(places.articles)
    assert index.search("Zurich", limit=1)[0].title == "Zürich (Switzerland)"
    assert index.search("sao paulo", limit=1)[0].title == "São Paulo (Brazil)"


def test_a_question_of_three_steps_is_answered_by_way_of_the_country(places):
    env = load_environment()
    question = next(question for question in places.questions if question.num_steps == 3)
    start, end = "How many residents does the capital of the country where the city ", " lies have?"
    city = question.text.removeprefix(start).removesuffix(end)
    calls = [tool_call("search", query=city), tool_call("read", title=question.source)]
    example = {**env.get_dataset()[0], "answer": question.answer, "info": {"source": question.source}}
    state = play(env, [*calls, f"<answer>{question.answer.replace(',', '')}</answer>"], example=example)
    found, text = said(state, "tool")
    assert any(title.startswith(f"{city} (") for title in found.splitlines())
    assert question.answer in text
    assert state["reward"] == pytest.approx(1.2)


def test_rare_words_weigh_more_than_common_ones_and_short_articles_more_than_long_ones():
    filler = [Article(title=f"t{number}", text="river town year") for number in range(10)]
    rare = Article(title="a", text="river zebra")
    long = Article(title="b", text="zebra " + "word " * 50)
    found = Index([*filler, long, rare]).search("the zebra river", limit=3)
    assert [article.title for article in found[:2]] == ["a", "b"]


def test_the_score_is_the_formula_of_the_paper():
    """Two articles have equal length. One has the word twice through its title: ln(1 + 1.5 / 1.5) * 2 * 2.5 / (2 + 1.5)."""
    index = Index([Article(title="u v", text=""), Article(title="x y", text="")])
    assert index.scores("x") == {1: pytest.approx(math.log(2) * 10 / 7)}
    assert index.scores("nothing of this") == {}


def test_reading_does_not_depend_on_case_and_a_wrong_title_is_told_to_the_model(invented):
    library = Library(invented.articles, num_results=3)
    assert library.read(" aldermoor ").startswith("Aldermoor is a town")
    assert library.read("Atlantis") == "There is no article 'Atlantis'; search for one."


def test_an_answer_that_was_looked_up_scores_with_its_source(env):
    example = env.get_dataset()[0]
    source = example["info"]["source"]
    calls = [tool_call("search", query=source), tool_call("read", title=source)]
    state = play(env, [*calls, f"<answer>{example['answer']}</answer>"])
    found, text = said(state, "tool")
    assert source in found.splitlines()
    assert example["answer"].lower() in text.lower()
    assert state["metrics"]["correct"] == state["metrics"]["found_source"] == 1.0
    assert state["reward"] == pytest.approx(1.2)
    assert titles_read(state["completion"]) == {source.lower()}


def test_a_guess_without_reading_scores_no_source_and_a_wrong_answer_nothing(env):
    answer = env.get_dataset()[0]["answer"]
    assert play(env, [f"<answer>{answer}</answer>"])["reward"] == 1.0
    assert play(env, ["<answer>forty-two</answer>"])["reward"] == 0.0
    assert play(env, [answer])["reward"] == 0.0


@pytest.mark.parametrize(
    ("given", "expected", "is_equal"),
    [
        ("49,000", "49000", True),
        ("the glass", "glass", False),
        ("Glass.", "glass", True),
        ("", "", False),
        ("...", "glass", False),
    ],
)
def test_answers_match_by_words(given, expected, is_equal):
    assert answers_match(given, expected) is is_equal


def test_an_unknown_encyclopedia_is_refused():
    with pytest.raises(ValueError, match="corpus must be one of 'places', 'invented', got 'wikipedia'"):
        load_environment("wikipedia")
