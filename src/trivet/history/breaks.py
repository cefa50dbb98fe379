"""Finds the step from which a metric stays beyond a threshold. Pure functions, for `trivet bisect`."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trivet.errors import ConfigError

PATIENCE = 3
"""Values in a row that must be beyond the threshold, or all up to the end: one may be chance."""
_EDGE = 3
"""Values at either end whose medians a derived threshold lies between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A bound of a metric."""

    value: float
    is_upper: bool
    """Values above it are broken; false: values below it."""

    def is_broken(self, value: float) -> bool:
        """Return whether `value` is beyond the bound. NaN always is."""
        return not (value <= self.value if self.is_upper else value >= self.value)

    def __str__(self) -> str:
        """Return the bound in words."""
        return f"{'above' if self.is_upper else 'below'} {self.value:.6g}"


def derive_threshold(values: Mapping[int, float]) -> Threshold:
    """Return the middle between the medians of the first and the last values, in the direction in which they moved.

    Raises:
        ConfigError: there are too few values, or they did not move.
    """
    finite = [values[step] for step in sorted(values) if np.isfinite(values[step])]
    if len(finite) < 2 * _EDGE:
        raise ConfigError(
            f"--above or --below is needed: a threshold is derived from {2 * _EDGE} values, and there are {len(finite)}"
        )
    first, last = float(np.median(finite[:_EDGE])), float(np.median(finite[-_EDGE:]))
    if first == last:
        raise ConfigError("--above or --below is needed: the metric ends where it began, so no threshold can be derived")
    return Threshold(value=(first + last) / 2, is_upper=last > first)


def find_break(values: Mapping[int, float], threshold: Threshold) -> int | None:
    """Return the first step from which `PATIENCE` values, or all up to the last, are broken; None if there is none."""
    steps = sorted(values)
    for index, step in enumerate(steps):
        if all(threshold.is_broken(values[other]) for other in steps[index : index + PATIENCE]):
            return step
    return None
