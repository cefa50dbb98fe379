"""Computes the five numbers by which an array is exported as metrics."""

import numpy as np


def summarize(name: str, values: np.ndarray) -> dict[str, float]:
    """Return `name`/mean, /median, /std, /min and /max of `values`; nothing when it is empty.

    A NaN in `values` makes all five NaN, which a metrics file leaves out: it is never averaged away.

    Args:
        values: any shape and numeric dtype; computed in float64.
    """
    if values.size == 0:
        return {}
    column = np.asarray(values, dtype=np.float64).ravel()
    return {
        f"{name}/mean": float(column.mean()),
        f"{name}/median": float(np.median(column)),
        f"{name}/std": float(column.std()),
        f"{name}/min": float(column.min()),
        f"{name}/max": float(column.max()),
    }
