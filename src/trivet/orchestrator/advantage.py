"""Maps `[orchestrator.advantage]` to the function that the dispatcher calls on each finished group.

The values that a function returns are checked: a wrong shape or a value that is not finite would otherwise reach the optimizer.
The launcher runs this module as a program to try a custom function, because the launcher itself imports no user code.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from trivet.algorithms.advantages import (
    AdvantageFunction,
    AdvantageInputs,
    leave_one_out,
    length_weighted_mean,
    mean_baseline,
    mean_normalised,
    raw_rewards,
    standardised,
    standardised_components,
)
from trivet.config.schema.orchestrator import AdvantageConfig
from trivet.errors import BatchError, ConfigError
from trivet.process.imports import import_by_path
from trivet.wire.rollouts import MAX_REWARD

_MAX_ADVANTAGE = 1e3 * MAX_REWARD
"""Limit on what a custom function returns, so that gradients fit into float32. Built-in formulas return values of about the size of
the rewards."""
_TRIAL_INPUTS = (
    AdvantageInputs(rewards=np.array([0.0, 0.25, 1.0, 1.0]), completion_lengths=np.array([3, 1, 40, 7])),
    AdvantageInputs(rewards=np.array([1.0, 1.0]), completion_lengths=np.array([5, 5])),
    AdvantageInputs(rewards=np.array([0.0, 0.0]), completion_lengths=np.array([0, 0])),
)
"""Inputs on which a custom function is tried at the start: an ordinary group, one that is all solved, one that is all failed and
has empty completions."""


def make_advantage(config: AdvantageConfig) -> AdvantageFunction:
    """Return the function that `config` names, with a check of each value that it returns.

    Raises:
        ConfigError: a custom function cannot be imported, or fails on a trial input.
    """
    name = f'orchestrator.advantage "{config.type}"'
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

        def function(inputs: AdvantageInputs) -> Any:
            return custom(inputs, **config.kwargs)

        for inputs in _TRIAL_INPUTS:
            try:
                _call_checked(function, inputs)
            except Exception as exc:  # the user's code
                raise ConfigError(
                    f"{name} called with rewards {inputs.rewards.tolist()}, completion_lengths"
                    f" {inputs.completion_lengths.tolist()} and kwargs {config.kwargs} failed ({type(exc).__name__}: {exc});"
                    " it takes (inputs, **kwargs) and returns one finite number per rollout"
                ) from exc
    else:
        function = {
            "default": length_weighted_mean if config.length_weighted_mean else mean_baseline,
            "length_weighted_mean": length_weighted_mean,
            "rloo": leave_one_out,
            "std_norm": partial(standardised, eps=config.eps),
            "max_rl": mean_normalised,
            "gdpo": partial(standardised_components, components=config.components, eps=config.eps),
            "none": raw_rewards,
        }[config.type]

    def advantage(inputs: AdvantageInputs) -> np.ndarray:
        try:
            return _call_checked(function, inputs)
        except Exception as exc:  # a custom function is the user's code: whatever it raises ends the run with its name
            raise BatchError(f"{name} of rewards {inputs.rewards.tolist()} failed: {exc}") from exc

    return advantage


def _call_checked(function: Callable[[AdvantageInputs], Any], inputs: AdvantageInputs) -> np.ndarray:
    """Call `function` and return its advantages as float64 [G]; raise ValueError when one of them cannot be trained on."""
    advantages = np.asarray(function(inputs), dtype=np.float64)
    if advantages.shape != inputs.rewards.shape:
        raise ValueError(f"returned shape {advantages.shape}, must be {inputs.rewards.shape}: one advantage per rollout")
    if not (np.abs(advantages) <= _MAX_ADVANTAGE).all():
        raise ValueError(f"returned {advantages.tolist()}, must be finite and at most {_MAX_ADVANTAGE:g} in size")
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
