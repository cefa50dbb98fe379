import pytest

from alphabet_sort import Name, expected_answers, load_environment, similarity
from support.scripted_policy import play, said

TURNS = [[Name(first="Zora", last="Abbott"), Name(first="Ada", last="Zhou")], [Name(first="Mina", last="Costa")]]


def tagged(*lines: str) -> str:
    return "<sorted>\n" + "\n".join(lines) + "\n</sorted>"


def perfect(example: dict) -> list[str]:
    return [tagged(*answer.splitlines()) for answer in example["info"]["expected"]]


@pytest.fixture
def env():
    return load_environment(num_examples=20, num_eval_examples=5, min_turns=2, max_turns=3)


def test_names_are_in_order_of_the_key_and_new_ones_are_marked_once():
    assert expected_answers(TURNS, key="first") == [["AdaZhou", "ZoraAbbott"], ["AdaZhou", "MinaCosta // new", "ZoraAbbott"]]
    assert expected_answers(TURNS, key="last")[1] == ["ZoraAbbott", "MinaCosta // new", "AdaZhou"]


def test_perfect_answers_score_one_and_take_the_turns_of_the_example(env):
    for example in env.get_dataset().to_list()[:5]:
        state = play(env, perfect(example), example=example)
        assert state["reward"] == 1.0
        assert len(state["trajectory"]) == len(example["info"]["expected"])
        assert said(state, "user") == example["info"]["follow_ups"]


def test_a_turn_without_tags_counts_nothing(env):
    example = env.get_dataset()[0]
    replies = ["no idea", *perfect(example)[1:]]
    turns = len(example["info"]["expected"])
    assert play(env, replies, example=example)["reward"] == pytest.approx((turns - 1) / turns)


def test_the_power_applies_per_turn_or_to_the_mean():
    per_turn, of_mean = (
        load_environment(num_examples=5, num_eval_examples=1, min_turns=2, max_turns=2, power_per_turn=flag)
        for flag in (True, False)
    )
    example = per_turn.get_dataset()[0]
    replies = [perfect(example)[0], "nothing"]
    assert play(per_turn, replies, example=example)["reward"] == pytest.approx(0.5)
    assert play(of_mean, replies, example=example)["reward"] == pytest.approx(0.5**4)


def test_a_wrong_order_scores_less_than_the_right_one_and_blanks_cost_nothing():
    assert similarity("  b\n\na ", "b\na") == 1.0
    assert 0.0 < similarity("AdaZhou\nMinaCosta", "MinaCosta\nAdaZhou") < 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"min_turns": 4}, "min_turns"),
        ({"min_names_per_turn": 0}, "min_names_per_turn"),
        ({"max_turns": 11, "max_names_per_turn": 5}, "55|11"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        load_environment(**args)
