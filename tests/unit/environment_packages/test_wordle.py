import pytest

from support.scripted_policy import play, said
from wordle import load_environment
from wordle.environment import split_words
from wordle.game import load_guesses, load_words, mark_guess, progress_of, why_invalid


@pytest.fixture
def env():
    return load_environment(num_examples=3, num_eval_examples=3, max_turns=3)


def example_with(env, secret: str) -> dict:
    return {**env.get_dataset()[0], "answer": secret}


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("crane", "cabin", "GXYYX"),
        ("speed", "abide", "XXYXY"),
        ("speed", "erase", "YXYYX"),
        ("speed", "steal", "GXGXX"),
        ("allee", "apple", "GYXXG"),
        ("geese", "eagle", "YYXXG"),
        ("babab", "abbey", "YYGXX"),
    ],
)
def test_a_letter_is_marked_as_often_as_the_secret_word_has_it(guess, secret, marks):
    assert "".join(mark_guess(guess, secret)) == marks


def test_the_words_that_may_be_guessed_are_several_times_the_secret_ones():
    assert set(load_words()) < load_guesses()
    assert len(load_guesses()) == 12171
    assert all(why_invalid(word) is None for word in load_guesses())


@pytest.mark.parametrize("guess", ["four", "sixsix", "ab cd", "cr4ne", "naïve"])
def test_what_is_no_word_of_five_letters_is_no_guess(guess):
    assert why_invalid(guess)


def test_every_word_is_played_before_one_is_played_again():
    train, _ = split_words(300)
    answers = list(load_environment(num_examples=len(train)).get_dataset()["answer"])
    assert sorted(answers) == sorted(train)


def test_a_game_ends_with_the_right_guess_and_says_so(env):
    state = play(env, ["<guess>crane</guess>", "I say <guess>CABIN</guess>"], example=example_with(env, "cabin"))
    assert said(state, "user") == ["C R A N E\nG X Y Y X\n2 guesses left.", "C A B I N\nG G G G G\nThat is the word."]
    assert state["metrics"]["solved"] == 1.0
    assert state["metrics"]["speed"] == 0.5
    assert state["reward"] == pytest.approx(1.0 + 0.5 * 0.5 + 0.2 + 0.1)


def test_the_last_guess_is_judged_too_and_then_the_word_is_told(env):
    state = play(env, ["<guess>crane</guess>"] * 3, example=example_with(env, "cabin"))
    assert said(state, "user")[-1] == "C R A N E\nG X Y Y X\nNo guesses left: the word was cabin."
    assert state["metrics"]["solved"] == state["metrics"]["speed"] == 0.0
    assert state["metrics"]["progress"] == pytest.approx(progress_of(mark_guess("crane", "cabin")))


def test_an_answer_without_a_valid_guess_costs_its_turn(env):
    state = play(env, ["crane", "<guess>cranes</guess>", "<guess>crane</guess>"], example=example_with(env, "crane"))
    assert said(state, "user")[0].startswith("There was no guess in <guess> tags.")
    assert said(state, "user")[1].startswith("'cranes' is not a word of 5 letters.")
    assert state["metrics"]["speed"] == pytest.approx(1 / 3)
    assert state["metrics"]["valid_guesses"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("args", "feedback"), [({}, "'qqqqq' is not in the word list."), ({"any_guess": True}, "Q Q Q Q Q")])
def test_a_game_may_take_any_five_letters_as_a_guess(args, feedback):
    env = load_environment(num_examples=1, max_turns=1, **args)
    assert said(play(env, ["<guess>qqqqq</guess>"]), "user")[0].startswith(feedback)
