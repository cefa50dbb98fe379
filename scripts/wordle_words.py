"""Writes the word lists of environments/wordle from two packages, which are needed for this alone:

uv run --no-project --with symspellpy==6.10.1 --with english-words==2.0.2 scripts/wordle_words.py

Answers are common words that a dictionary has as words of their own: no names and few plurals. Guesses are all words of both.
"""

import importlib
import importlib.util
import re
from collections.abc import Collection, Mapping
from pathlib import Path

LISTS = Path(__file__).parents[1] / "environments" / "wordle" / "wordle"
NUM_ANSWERS = 2315
"""The number of answers of the newspaper's game."""
_UNSUITABLE = """
bitch boned booby boobs chink dildo enema gypsy horny labia lynch moron negro nonce penis
prick pubic pussy queer raped raper semen sperm squaw titty twink vulva whore
"""
NOT_ANSWERS = frozenset(_UNSUITABLE.split())
"""Words that a player should not be asked to find. They remain valid guesses."""
_FREQUENCIES = "frequency_dictionary_en_82_765.txt"


def choose_answers(frequencies: Mapping[str, int], *, dictionary: Collection[str], count: int) -> list[str]:
    """Return the `count` most frequent words of the dictionary, sorted.

    Args:
        frequencies: uses of each word.
    """
    common = sorted(frequencies.keys() & set(dictionary) - NOT_ANSWERS, key=lambda word: (-frequencies[word], word))
    return sorted(common[:count])


def read_frequencies() -> dict[str, int]:
    """Return the words of five letters in symspellpy's list, with their uses."""
    spec = importlib.util.find_spec("symspellpy")
    if spec is None or spec.origin is None:
        raise SystemExit("symspellpy is not installed: run this as the first lines of this file say")
    lines = Path(spec.origin).with_name(_FREQUENCIES).read_text(encoding="utf-8-sig").splitlines()
    return {word: int(uses) for word, uses in (line.split() for line in lines) if is_playable(word)}


def read_dictionary() -> set[str]:
    """Return the words of five letters of Webster's second edition that are no names."""
    words = importlib.import_module("english_words").get_english_words_set(["web2"])
    return {word for word in words if is_playable(word)}


def is_playable(word: str) -> bool:
    """Return whether a word has five letters, all of them small."""
    return re.fullmatch("[a-z]{5}", word) is not None


def main() -> None:
    """Write answers.txt and guesses.txt."""
    frequencies, dictionary = read_frequencies(), read_dictionary()
    answers = choose_answers(frequencies, dictionary=dictionary, count=NUM_ANSWERS)
    for name, words in (("answers.txt", answers), ("guesses.txt", sorted({*frequencies, *dictionary}))):
        (LISTS / name).write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
        print(f"{name}: {len(words)} words")


if __name__ == "__main__":
    main()
