"""Maps `[orchestrator.advantage]` to the function that the dispatcher calls on each finished group.

The values that a function returns are checked: a wrong shape or a value that is not finite would otherwise reach the optimizer.
The launcher runs this module as a program to try a custom function, because the launcher itself imports no user code.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from trivet.algorithms.advantages import (
    AdvantageFunction,
    AdvantageInputs,
    Advantages,
    agent_baselines,
    leave_one_out,
    length_weighted_mean,
    mean_baseline,
    mean_normalised,
    raw_rewards,
    standardised,
    standardised_components,
    turn_returns,
)
from trivet.config.schema.orchestrator import AdvantageConfig
from trivet.errors import BatchError, ConfigError
from trivet.process.imports import import_by_path
from trivet.wire.rollouts import MAX_REWARD

_MAX_ADVANTAGE = 1e3 * MAX_REWARD
"""Limit on what a custom function returns, so that gradients fit into float32. Built-in formulas return values of about the size of
the rewards."""


class _TrialScores(dict[str, np.ndarray]):
    """Scores of a trial, where any name has one: the names are the environment's, which is not loaded here."""

    def __init__(self, rewards: np.ndarray) -> None:
        super().__init__()
        self._rewards = rewards

    def __missing__(self, name: str) -> np.ndarray:
        return self._rewards.copy()

    def get(self, name: str, default: object = None) -> np.ndarray:  # type: ignore[override]  # no name lacks a score
        return self[name]

    def __contains__(self, name: object) -> bool:
        return True


def _make_trial(rewards: list[float], turn_lengths: list[list[int]]) -> AdvantageInputs:
    lengths = [np.array(counts, dtype=np.int64) for counts in turn_lengths]
    return AdvantageInputs(
        rewards=np.array(rewards),
        completion_lengths=np.array([counts.sum() for counts in lengths]),
        scores=_TrialScores(np.array(rewards)),
        turn_lengths=lengths,
        turn_rewards=[np.full(len(counts), 0.5) for counts in lengths],
        turn_agents=[[""] * len(counts) for counts in lengths],
        token_ids=[np.arange(counts.sum(), dtype=np.int32) for counts in lengths],
    )


_TRIAL_INPUTS = (
    _make_trial([0.0, 0.25, 1.0, 1.0], [[2, 1], [1], [20, 0, 20], [7]]),
    _make_trial([1.0, 1.0], [[5], [5]]),
    _make_trial([0.0, 0.0], [[0], [0]]),
)
"""Inputs on which a custom function is tried at the start: an ordinary group, one that is all solved, one that is all failed and
has empty completions."""


def make_advantage(config: AdvantageConfig) -> AdvantageFunction:
    """Return the function that `config` names, with a check of each value that it returns.

    Raises:
        ConfigError: a custom function cannot be imported, or fails on a trial input.
    """
    name = f'orchestrator.advantage "{config.type}"'
    function: Callable[[AdvantageInputs], Any]
    if config.type == "custom":
        path = config.import_path or ""
        name = f'orchestrator.advantage.import_path "{config.import_path}"'
        if not path.replace(":", ".").rpartition(".")[0]:
            raise ConfigError(f'{name} must be "module.function"; the module has to be installed, or on PYTHONPATH')
        try:
            custom: Callable[..., Any] = import_by_path(path)
        except Exception as exc:  # importing runs the user's code
            raise ConfigError(
                f"{name} cannot be imported ({type(exc).__name__}: {exc}); give module.function of a module that"
                " is installed, or on PYTHONPATH"
            ) from exc

        def call_custom(inputs: AdvantageInputs) -> Any:
            return custom(inputs, **config.kwargs)

        function = call_custom
        for inputs in _TRIAL_INPUTS:
            try:
                _call_checked(function, inputs)
            except Exception as exc:  # the user's code
                raise ConfigError(
                    f"{name} called with rewards {inputs.rewards.tolist()}, completion_lengths"
                    f" {inputs.completion_lengths.tolist()} and kwargs {config.kwargs} failed ({type(exc).__name__}: {exc});"
                    " it takes (inputs, **kwargs) and returns one finite number per rollout, or an array per rollout with one"
                    " per sampled token"
                ) from exc
    else:
        function = {
            "default": length_weighted_mean if config.length_weighted_mean else mean_baseline,
            "length_weighted_mean": length_weighted_mean,
            "rloo": leave_one_out,
            "std_norm": partial(standardised, eps=config.eps),
            "max_rl": mean_normalised,
            "gdpo": partial(standardised_components, components=config.components, eps=config.eps),
            "turns": turn_returns,
            "agents": agent_baselines,
            "none": raw_rewards,
        }[config.type]

    def advantage(inputs: AdvantageInputs) -> Advantages:
        try:
            return _call_checked(function, inputs)
        except Exception as exc:  # a custom function is the user's code: whatever it raises ends the run with its name
            raise BatchError(f"{name} of rewards {inputs.rewards.tolist()} failed: {exc}") from exc

    return advantage


def _call_checked(function: Callable[[AdvantageInputs], Any], inputs: AdvantageInputs) -> Advantages:
    """Call `function` and return its advantages as float64; raise ValueError when one of them cannot be trained on."""
    returned: Any = function(inputs)
    arrays = cast("Sequence[Any]", returned) if isinstance(returned, list | tuple) else ()
    if any(np.ndim(values) for values in arrays):
        if len(arrays) != len(inputs.rewards):
            raise ValueError(f"returned {len(arrays)} arrays, must be {len(inputs.rewards)}: one per rollout")
        return [_check_tokens(values, index, inputs) for index, values in enumerate(arrays)]
    advantages = np.asarray(returned, dtype=np.float64)
    if advantages.shape != inputs.rewards.shape:
        raise ValueError(f"returned shape {advantages.shape}, must be {inputs.rewards.shape}: one advantage per rollout")
    if not (np.abs(advantages) <= _MAX_ADVANTAGE).all():
        raise ValueError(f"returned {advantages.tolist()}, must be finite and at most {_MAX_ADVANTAGE:g} in size")
    return advantages


def _check_tokens(returned: Any, index: int, inputs: AdvantageInputs) -> np.ndarray:
    """Return what was returned for rollout `index` as float64 [sampled tokens]."""
    advantages, num_tokens = np.asarray(returned, dtype=np.float64), int(inputs.turn_lengths[index].sum())
    if advantages.shape != (num_tokens,):
        raise ValueError(
            f"returned shape {advantages.shape} for rollout {index}, must be ({num_tokens},): one advantage per sampled token;"
            " inputs.per_token makes them of one per turn"
        )
    is_valid = np.abs(advantages) <= _MAX_ADVANTAGE
    if not is_valid.all():
        found = advantages[~is_valid][0]
        raise ValueError(f"returned {found:g} for rollout {index}, must be finite and at most {_MAX_ADVANTAGE:g} in size")
    return advantages


def main() -> int:
    """Read an `[orchestrator.advantage]` section as JSON from standard input and try its function. Return the exit code.

    A problem is written to standard error.
    """
    try:
        make_advantage(AdvantageConfig.model_validate_json(sys.stdin.read()))
    except ConfigError as exc:
        sys.stderr.write(f"{exc}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
