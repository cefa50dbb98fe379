"""A game with the interface of Gymnasium as an environment."""

import random

import pytest

from support.higher_lower import HigherLower
from support.scripted_policy import play, said
from trivet.environments.apis.v0.text_games import make_environment


def test_a_rollout_plays_until_the_game_ends_and_gets_the_sum_of_its_rewards() -> None:
    env = make_environment(HigherLower, num_examples=3, system_prompt="Reply with a number.")
    secret = random.Random(0).randint(1, 9)
    state = play(env, ["0", "10", f" {secret}\n", "never asked"])
    assert said(state, "user") == ["higher", "lower", "right"]
    assert state["reward"] == pytest.approx(0.8)
    assert [message["content"] for message in env.get_dataset()[2]["prompt"]] == [
        "Reply with a number.",
        "Game 2: guess a number from 1 to 9.",
    ]


def test_the_last_action_counts_and_seeds_of_training_and_evaluation_differ() -> None:
    env = make_environment(HigherLower, num_examples=2, num_eval_examples=2, max_turns=2)
    state = play(env, ["0", "0", "never asked"])
    assert state["reward"] == pytest.approx(-0.2)
    seeds = [{row["info"]["seed"] for row in dataset} for dataset in (env.get_dataset(), env.get_eval_dataset())]
    assert not set.intersection(*seeds)


def test_a_game_that_does_not_follow_its_seed_fails_the_rollout() -> None:
    env = make_environment(lambda: HigherLower(forgets_seed=True), num_examples=1)
    with pytest.raises(Exception, match=r"reset\(seed=0\) began with another text"):
        play(env, ["5"])
