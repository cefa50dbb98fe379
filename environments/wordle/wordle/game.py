"""Implements the rules of the game: what a guess reveals. Pure."""

from collections import Counter
from enum import StrEnum
from functools import cache
from pathlib import Path

WORD_LENGTH = 5


class Mark(StrEnum):
    """The feedback about one letter of a guess."""

    HERE = "G"
    """The secret word has this letter in this place."""
    ELSEWHERE = "Y"
    """The secret word has this letter in another place that no other letter of the guess accounts for."""
    ABSENT = "X"
    """The secret word does not have this letter, or not once more."""


def load_words() -> list[str]:
    """Return the bundled secret words, sorted."""
    return _read_list("answers.txt")


@cache
def load_guesses() -> frozenset[str]:
    """Return the words that may be guessed. Every secret word is one of them."""
    return frozenset(_read_list("guesses.txt"))


def _read_list(name: str) -> list[str]:
    return Path(__file__).with_name(name).read_text(encoding="utf-8").split()


def mark_guess(guess: str, secret: str) -> list[Mark]:
    """Return one mark per letter of the guess.

    A letter that the guess has more often than the secret word is marked only as often as the secret word has it: letters in
    their place first, then from the left.
    """
    marks = [Mark.HERE if letter == right else Mark.ABSENT for letter, right in zip(guess, secret, strict=True)]
    unplaced = Counter(right for mark, right in zip(marks, secret, strict=True) if mark is not Mark.HERE)
    for place, letter in enumerate(guess):
        if marks[place] is Mark.ABSENT and unplaced[letter] > 0:
            marks[place] = Mark.ELSEWHERE
            unplaced[letter] -= 1
    return marks


def why_invalid(guess: str, *, is_any_word_allowed: bool = False) -> str | None:
    """Return what is wrong with a guess in small letters, for the player; None when it counts.

    Args:
        is_any_word_allowed: any five letters count, listed or not.
    """
    if len(guess) != WORD_LENGTH or not (guess.isascii() and guess.isalpha()):
        return f"{guess[:40]!r} is not a word of {WORD_LENGTH} letters"
    if not is_any_word_allowed and guess not in load_guesses():
        return f"{guess!r} is not in the word list"
    return None


def render_marks(guess: str, marks: list[Mark]) -> str:
    """Write the guess and its marks in two lines.

    >>> print(render_marks("crane", mark_guess("crane", "cabin")))
    C R A N E
    G X Y Y X
    """
    return f"{' '.join(guess.upper())}\n{' '.join(marks)}"


def progress_of(marks: list[Mark]) -> float:
    """Return from 0 to 1 how close a guess is: a letter in its place counts 1, one that belongs elsewhere a half."""
    points = {Mark.HERE: 1.0, Mark.ELSEWHERE: 0.5, Mark.ABSENT: 0.0}
    return sum(points[mark] for mark in marks) / len(marks)
