"""Maps `[orchestrator.advantage]` to the function that the dispatcher calls on each finished group.

Whatever the function, what it returns is checked: a wrong shape or a value that is not finite would otherwise reach the
optimizer. As a program it tries a custom function for the launcher, which imports no user code.
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
)
from trivet.config.schema.orchestrator import AdvantageConfig
from trivet.errors import BatchError, ConfigError
from trivet.process.imports import import_by_path
from trivet.wire.rollouts import MAX_REWARD

_MAX_ADVANTAGE = 1e3 * MAX_REWARD
"""The formulas return advantages of the size of the rewards. A custom function may return more, as much as float32 can train on."""
_PROBES = (
    AdvantageInputs(rewards=np.array([0.0, 0.25, 1.0, 1.0]), completion_lengths=np.array([3, 1, 40, 7])),
    AdvantageInputs(rewards=np.array([1.0, 1.0]), completion_lengths=np.array([5, 5])),
    AdvantageInputs(rewards=np.array([0.0, 0.0]), completion_lengths=np.array([0, 0])),
)
"""Inputs on which a custom function is tried at the start: an ordinary group, one all solved, one all failed and empty."""


def make_advantage(config: AdvantageConfig) -> AdvantageFunction:
    """Return the function that `config` names. It checks what it returns.

    Raises:
        ConfigError: a custom function cannot be imported, refuses what it is given, or returns what cannot be trained on.
    """
    if config.type == "custom":
        function = _load_custom(config)
    else:
        function = {
            "default": length_weighted_mean if config.length_weighted_mean else mean_baseline,
            "length_weighted_mean": length_weighted_mean,
            "rloo": leave_one_out,
            "std_norm": partial(standardised, eps=config.eps),
            "max_rl": mean_normalised,
            "none": raw_rewards,
        }[config.type]

    def checked(inputs: AdvantageInputs) -> np.ndarray:
        """Return the advantages, or raise BatchError with the name of the function that failed."""
        try:
            return _checked(function, inputs)
        except Exception as exc:  # a custom function is the user's code: whatever it raises ends the run with its name
            raise BatchError(f"{_name(config)} of rewards {inputs.rewards.tolist()} failed: {exc}") from exc

    return checked


def _load_custom(config: AdvantageConfig) -> AdvantageFunction:
    path = config.import_path or ""
    if not path.replace(":", ".").rpartition(".")[0]:
        raise ConfigError(f'{_name(config)} must be "module.function"; the module has to be installed, or on PYTHONPATH')
    try:
        function: Callable[..., Any] = import_by_path(path)
    except Exception as exc:  # importing runs the user's code
        raise ConfigError(
            f"{_name(config)} cannot be imported ({type(exc).__name__}: {exc}); give module.function of a module that"
            " is installed, or on PYTHONPATH"
        ) from exc

    def bound(inputs: AdvantageInputs) -> Any:
        """Call the custom function with its configured arguments."""
        return function(inputs, **config.kwargs)

    for probe in _PROBES:
        try:
            _checked(bound, probe)
        except Exception as exc:  # the user's code
            raise ConfigError(
                f"{_name(config)} called with rewards {probe.rewards.tolist()}, completion_lengths"
                f" {probe.completion_lengths.tolist()} and kwargs {config.kwargs} failed ({type(exc).__name__}: {exc});"
                " it takes (inputs, **kwargs) and returns one finite number per rollout"
            ) from exc
    return bound


def _checked(function: Callable[[AdvantageInputs], Any], inputs: AdvantageInputs) -> np.ndarray:
    """Return the advantages as float64 [G]."""
    advantages = np.asarray(function(inputs), dtype=np.float64)
    if advantages.shape != inputs.rewards.shape:
        raise ValueError(f"returned shape {advantages.shape}, must be {inputs.rewards.shape}: one advantage per rollout")
    if not (np.abs(advantages) <= _MAX_ADVANTAGE).all():
        raise ValueError(f"returned {advantages.tolist()}, must be finite and at most {_MAX_ADVANTAGE:g} in size")
    return advantages


def _name(config: AdvantageConfig) -> str:
    if config.type == "custom":
        return f'orchestrator.advantage.import_path "{config.import_path}"'
    return f'orchestrator.advantage "{config.type}"'


def main() -> int:
    """Try the function of the section that stands on standard input as JSON; what is wrong is said on standard error."""
    try:
        make_advantage(AdvantageConfig.model_validate_json(sys.stdin.read()))
    except ConfigError as exc:
        sys.stderr.write(f"{exc}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
