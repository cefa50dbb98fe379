from support.scripts import load_script

words = load_script("wordle_words")


def test_answers_are_the_most_frequent_words_of_the_dictionary_in_alphabetical_order():
    frequencies = {"zebra": 9, "apple": 8, "lenny": 7, "crane": 6, "adits": 1}
    assert words.choose_answers(frequencies, dictionary={"crane", "zebra", "apple", "adits"}, count=3) == [
        "apple",
        "crane",
        "zebra",
    ]


def test_words_of_equal_frequency_are_chosen_in_alphabetical_order():
    assert words.choose_answers({"beta5": 1, "alpha": 1}, dictionary={"alpha", "beta5"}, count=1) == ["alpha"]


def test_a_word_that_nobody_should_have_to_find_is_no_answer():
    [unsuitable] = sorted(words.NOT_ANSWERS)[:1]
    assert words.choose_answers({unsuitable: 5, "crane": 1}, dictionary={unsuitable, "crane"}, count=2) == ["crane"]
