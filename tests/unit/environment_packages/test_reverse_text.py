import pytest

from reverse_text import (
    load_environment,
    make_texts,
    plain_reversal_reward,
    reversal_reward,
)


def completion(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_held_out_texts_do_not_depend_on_the_number_of_training_texts():
    small, large = (load_environment(num_examples=count, num_eval_examples=10) for count in (20, 40))
    assert list(small.get_eval_dataset()["question"]) == list(large.get_eval_dataset()["question"])


def test_texts_are_distinct_and_of_every_length_asked_for():
    texts = make_texts(400, min_length=3, max_length=6, seed="any")
    assert len(set(texts)) == 400
    assert {len(text) for text in texts} == {3, 4, 5, 6}


@pytest.mark.parametrize(("lengths", "message"), [((1, 1), "raise max_length"), ((5, 4), "min_length"), ((0, 4), "min_length")])
def test_lengths_that_cannot_be_drawn_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        make_texts(20, min_length=lengths[0], max_length=lengths[1], seed="any")


def test_the_answer_of_an_example_is_its_reversal():
    row = load_environment(num_examples=1, num_eval_examples=1).get_dataset()[0]
    assert row["answer"] == row["question"][::-1]


def test_a_true_reversal_scores_one_and_a_wrong_letter_costs_its_share():
    assert reversal_reward(completion("<reversed_text>cba</reversed_text>"), "cba") == 1.0
    assert reversal_reward(completion("well: <reversed_text> cba </reversed_text>!"), "cba") == 1.0
    assert reversal_reward(completion("<reversed_text>cxa</reversed_text>"), "cba") == pytest.approx(2 / 3)


@pytest.mark.parametrize("text", ["cba", "<reversed_text>cba", "cba</reversed_text>", ""])
def test_an_answer_without_both_tags_scores_zero(text):
    assert reversal_reward(completion(text), "cba") == 0.0


def test_without_tags_the_whole_answer_counts_and_needless_words_cost():
    exact, wordy = (plain_reversal_reward(completion(text), "cba") for text in (" cba ", "The answer is cba"))
    assert exact == 1.0
    assert 0.0 < wordy < exact
