"""An OpenEnv server with two environments of texts: `echo`, which rewards the letters of a message, and `guess`, a game.

    python openenv_games.py echo PORT

It runs with OpenEnv's own classes, in the virtual environment that has them.
"""

import random
import sys

import uvicorn
from openenv.core.env_server import (  # pyright: ignore[reportMissingImports]  it runs in another virtual environment
    Action,
    Environment,
    Observation,
    State,
    create_fastapi_app,
)

_MAX_SESSIONS = 256
_MAX_GUESSES = 5


class Say(Action):
    """A message of the model."""

    message: str


class Heard(Observation):
    """A message of the environment."""

    text: str


class Echo(Environment):
    """Repeats a message once. The reward is the share of lower-case letters in it, so a plain word gets the most."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: object) -> Heard:
        return Heard(text="Say one word in lower case.")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: object) -> Heard:
        letters = sum("a" <= character <= "z" for character in action.message)
        return Heard(text=action.message, done=True, reward=letters / max(len(action.message), 1))

    @property
    def state(self) -> State:
        return State()


class Guess(Environment):
    """The secret is a number from 1 to 9. The right guess gives 1, a reply that is a number 0.1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: object) -> Heard:
        self._secret, self._num_guesses = random.Random(seed).randint(1, 9), 0
        return Heard(text="Guess my number from 1 to 9. Reply with the number alone.")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: object) -> Heard:
        self._num_guesses += 1
        said = action.message.strip()
        if not (said.isdigit() and len(said) == 1):
            return Heard(text="That is no number from 1 to 9.", done=self._num_guesses >= _MAX_GUESSES, reward=0.0)
        if int(said) == self._secret:
            return Heard(text="Right.", done=True, reward=1.0)
        hint = "higher" if int(said) < self._secret else "lower"
        return Heard(text=f"My number is {hint}.", done=self._num_guesses >= _MAX_GUESSES, reward=0.1)

    @property
    def state(self) -> State:
        return State(step_count=self._num_guesses)


if __name__ == "__main__":
    game = {"echo": Echo, "guess": Guess}[sys.argv[1]]
    app = create_fastapi_app(game, Say, Heard, max_concurrent_envs=_MAX_SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
