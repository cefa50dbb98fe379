"""Makes an environment of the game: one guess a turn, and feedback from the rules in `game`."""

import random
from typing import Any

import verifiers as vf
from datasets import Dataset

from wordle.game import WORD_LENGTH, Mark, load_words, mark_guess, progress_of, render_marks, why_invalid

SYSTEM_PROMPT = f"""You play a game: find a secret English word of {WORD_LENGTH} letters.
Each turn, guess one word in <guess> tags, for example <guess>crane</guess>. It must be a real word.
After each guess you are told about every letter: {Mark.HERE} it is in the right place, {Mark.ELSEWHERE} the word has it in
another place, {Mark.ABSENT} the word does not have it (again)."""
FIRST_MESSAGE = "The word is chosen. Your first guess?"


class WordleEnv(vf.MultiTurnEnv):
    """Plays one game in `state["guesses"]`, the valid guesses so far. A turn without a valid guess is lost."""

    is_any_word_allowed = False
    """Any five letters are a valid guess, not only listed words."""

    async def setup_state(self, state: vf.State) -> vf.State:
        """Begin a game without guesses."""
        state["guesses"] = []
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        """Return the feedback to the last guess, and end the game when it is over."""
        feedback = self._judge(messages, state)
        left = self.max_turns - len(state["trajectory"])
        if state["guesses"] and state["guesses"][-1] == state["answer"]:
            feedback = f"{feedback}\nThat is the word."
        elif left <= 0:
            feedback = f"{feedback}\nNo guesses left: the word was {state['answer']}."
        else:
            return [vf.UserMessage(content=f"{feedback}\n{left} {'guess' if left == 1 else 'guesses'} left.")]
        state["final_env_response"] = [vf.UserMessage(content=feedback)]
        return state["final_env_response"]

    @vf.stop
    async def max_turns_reached(self, state: vf.State) -> bool:
        """Never end the game here: the last guess is judged too, and then `final_env_response` ends it."""
        return False

    def _judge(self, messages: vf.Messages, state: vf.State) -> str:
        guess = (self.parser.parse_answer(messages[-1:]) or "").lower()
        if not guess:
            return "There was no guess in <guess> tags."
        if problem := why_invalid(guess, is_any_word_allowed=self.is_any_word_allowed):
            return f"{problem}."
        state["guesses"].append(guess)
        return render_marks(guess, mark_guess(guess, state["answer"]))


def solved(state: vf.State, answer: str) -> float:
    """Return 1 when the word was found, else 0."""
    return float(answer in state["guesses"])


def speed(state: vf.State, answer: str) -> float:
    """Return 1 for a word found at the first turn, 1/2 at the second, and so on; 0 when it was not found."""
    return solved(state, answer) / len(state["trajectory"])


def progress(state: vf.State, answer: str) -> float:
    """Return how much of the word the best guess had; see `progress_of`."""
    return max((progress_of(mark_guess(guess, answer)) for guess in state["guesses"]), default=0.0)


def valid_guesses(state: vf.State) -> float:
    """Return the share of the turns that had a valid guess."""
    return len(state["guesses"]) / max(len(state["trajectory"]), 1)


def split_words(num_eval_words: int) -> tuple[list[str], list[str]]:
    """Split the words into those to train on and those to evaluate on, in the same way for every seed of a run.

    Raises:
        ValueError: nothing is left to train on.
    """
    words = load_words()
    if not 1 <= num_eval_words < len(words):
        raise ValueError(f"num_eval_words ({num_eval_words}) must be >= 1 and below the number of words ({len(words)})")
    random.Random("wordle/split").shuffle(words)
    return words[num_eval_words:], words[:num_eval_words]


def make_dataset(words: list[str], count: int, *, seed: str) -> Dataset:
    """Return `count` games; no word repeats before every word was drawn."""
    generator = random.Random(seed)
    secrets: list[str] = []
    while len(secrets) < count:
        secrets += generator.sample(words, min(len(words), count - len(secrets)))
    return Dataset.from_dict({"question": [FIRST_MESSAGE] * count, "answer": secrets})


def load_environment(
    num_examples: int = 2000,
    num_eval_examples: int = 300,
    num_eval_words: int = 300,
    max_turns: int = 6,
    any_guess: bool = False,
    seed: int = 0,
    system_prompt: str = SYSTEM_PROMPT,
) -> vf.Environment:
    """Return a multi-turn environment over the bundled words. No evaluation word is ever trained on.

    Args:
        num_eval_words: words that are kept for evaluation.
        max_turns: guesses in a game.
        any_guess: any five letters are a valid guess, for a model that has not learned words yet.
        seed: another seed gives another order of words.
    """
    if max_turns < 1:
        raise ValueError(f"max_turns must be >= 1, got {max_turns}")
    train_words, eval_words = split_words(num_eval_words)
    parser = vf.XMLParser(fields=["guess"], answer_field="guess")
    env = WordleEnv(
        dataset=make_dataset(train_words, num_examples, seed=f"{seed}/train"),
        eval_dataset=make_dataset(eval_words, num_eval_examples, seed=f"{seed}/eval"),
        system_prompt=system_prompt,
        parser=parser,
        rubric=vf.Rubric(funcs=[solved, speed, progress, valid_guesses], weights=[1.0, 0.5, 0.2, 0.1], parser=parser),
        max_turns=max_turns,
    )
    env.is_any_word_allowed = any_guess
    return env
