"""A game with the interface of Gymnasium: guess a number from 1 to 9."""

import random
from typing import Any

import verifiers as vf

from trivet.environments.apis.v0.text_games import make_environment


class HigherLower:
    """The secret is a number from 1 to 9; each guess costs 0.1, and the right one gives 1."""

    def __init__(self, *, forgets_seed: bool = False) -> None:
        self._draw = random.Random() if forgets_seed else None

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        self._secret = (self._draw or random.Random(seed)).randint(1, 9)
        clue = f" It is not {self._draw.random()}." if self._draw else ""
        return f"Game {seed}: guess a number from 1 to 9.{clue}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        guess = int(action) if action.isdigit() else 0
        if guess == self._secret:
            return "right", 1.0, True, False, {}
        return "higher" if guess < self._secret else "lower", -0.1, False, False, {}


def load_environment() -> vf.Environment:
    return make_environment(HigherLower, num_examples=64, max_turns=5, system_prompt="Reply with one number alone.")
