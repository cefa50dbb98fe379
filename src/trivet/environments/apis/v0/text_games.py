"""Makes an environment of a game with the interface of Gymnasium: `reset` and `step`, whose observations and actions are texts.

    from trivet.environments.apis.v0.text_games import make_environment

    def load_environment(**args):
        return make_environment(lambda: MyGame(**args), num_examples=1000, max_turns=10)

An example is a seed of `reset`. Its first observation is the prompt; each reply of the model is an action, and the reward of a
rollout is the sum of the rewards of its steps. Source of the interface: gymnasium.Env, release 1.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import verifiers as vf
from datasets import Dataset

_GAME, _REWARDS, _SEED = "text_game", "text_game_rewards", "seed"
"""Keys of a rollout's state and of an example's `info`."""
_EVAL_SEED = 2**30
"""First seed of the evaluation data. Training data has smaller ones."""


class TextGame(Protocol):
    """A game as `gymnasium.Env[str, str]`."""

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin a game; return its first observation and further information."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action; return observation, reward, whether the game has ended, whether it was cut off, and information."""
        ...


class TextGameEnv(vf.MultiTurnEnv):
    """Plays a game in `state["text_game"]`."""

    def __init__(self, make_game: Callable[[], TextGame], read_action: Callable[[str], str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._make_game = make_game
        self._read_action = read_action

    async def setup_state(self, state: vf.State) -> vf.State:
        """Begin the game of the example.

        Raises:
            ValueError: the game does not begin as it did when the data were made.
        """
        seed = state["info"][_SEED]
        game = state[_GAME] = self._make_game()
        state[_REWARDS] = []
        observation, _ = await asyncio.to_thread(game.reset, seed=seed)
        if observation != _text(state["prompt"][-1]):
            raise ValueError(f"reset(seed={seed}) began with another text than when the data were made: {observation[:200]!r}")
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        """Take the action of the last reply, and return the observation."""
        action = self._read_action(_text(messages[-1]))
        observation, reward, has_ended, is_cut_off, _ = await asyncio.to_thread(state[_GAME].step, action)
        state[_REWARDS].append(float(reward))
        response = [vf.UserMessage(content=observation)]
        if has_ended or is_cut_off or len(state["trajectory"]) >= self.max_turns > 0:
            state["final_env_response"] = response
        return response

    @vf.stop
    async def max_turns_reached(self, state: vf.State) -> bool:
        """Never end the game here: the last action is taken too, and then `final_env_response` ends it."""
        return False


def game_reward(state: vf.State) -> float:
    """Return the sum of the rewards of a rollout's steps."""
    return float(sum(state[_REWARDS]))


def make_environment(
    make_game: Callable[[], TextGame],
    *,
    num_examples: int,
    num_eval_examples: int = 32,
    max_turns: int = -1,
    system_prompt: str | None = None,
    read_action: Callable[[str], str] = str.strip,
) -> vf.Environment:
    """Return an environment whose examples are seeds of a game.

    Args:
        make_game: makes a game, of which each rollout has its own.
        max_turns: actions of a rollout; -1: until the game ends.
        read_action: reads the action from a reply.
    """

    def make_dataset(first_seed: int, count: int) -> Dataset:
        game, system = make_game(), [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        seeds = range(first_seed, first_seed + count)
        prompts = [[*system, {"role": "user", "content": game.reset(seed=seed)[0]}] for seed in seeds]
        rows = [{"prompt": prompt, "answer": "", "info": {_SEED: seed}} for prompt, seed in zip(prompts, seeds, strict=True)]
        return Dataset.from_list(rows)

    return TextGameEnv(
        make_game,
        read_action,
        dataset=make_dataset(0, num_examples),
        eval_dataset=make_dataset(_EVAL_SEED, num_eval_examples),
        rubric=vf.Rubric(funcs=[game_reward]),
        max_turns=max_turns,
    )


def _text(message: Any) -> str:
    content = message["content"] if isinstance(message, Mapping) else message.content
    return str(content or "")
