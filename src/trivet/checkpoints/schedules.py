"""Knows the schedules of a role's configuration, and the steps at which those end that name no step themselves.

A schedule that names none ends at max_steps. That is decided once: every checkpoint keeps the step, so that a run which is resumed
with another max_steps goes on along the same schedule.
"""

import re
from collections.abc import Mapping
from typing import Any

Values = Mapping[str, Any]
"""Values by dotted key, those that are unset left out."""

POSITION = re.compile(r"\.\d+(?=\.)")
"""The position of a table in a list, as it stands in a dotted key."""
LEARNING_RATE = "scheduler"
SCHEDULES = (LEARNING_RATE, "sampling.temp_scheduler", "env.*.sampling.temp_scheduler")
"""Sections of the roles with a `type` and a `total_steps`."""


def unset_lengths(values: Values, *, saved: Values | None = None) -> dict[str, int]:
    """Return the total_steps of each schedule that has none in `values`, by dotted key.

    Args:
        saved: of the checkpoint resumed from, whose schedule of the same type is continued; None: every schedule begins.
    """
    lengths: dict[str, int] = {}
    for key, kind in values.items():
        schedule, dot, name = key.rpartition(".")
        if f"{dot}{name}" != ".type" or POSITION.sub(".*", f"{schedule}.").rstrip(".") not in SCHEDULES or kind == "constant":
            continue
        begins = saved is None or saved.get(key) != kind or (schedule == LEARNING_RATE and values.get("ckpt.skip_scheduler"))
        known = values if begins or saved is None else saved
        length = known.get(f"{schedule}.total_steps", known.get("max_steps"))
        if f"{schedule}.total_steps" not in values and length is not None:
            lengths[f"{schedule}.total_steps"] = length
    return lengths
