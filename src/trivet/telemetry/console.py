"""The line that each role writes when a step is done, in the form that users of prime-rl search their logs for. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Part:
    label: str
    metric: str
    form: str


_TRAINER = (
    _Part("Time", "time/step", "{:.2f}s"),
    _Part("Loss", "loss/mean", "{:.4f}"),
    _Part("Entropy", "entropy/mean", "{:.4f}"),
    _Part("Mismatch KL", "mismatch_kl/mean", "{:.4f}"),
    _Part("Grad. Norm", "optim/grad_norm", "{:.4f}"),
    _Part("LR", "optim/lr", "{:.2e}"),
    _Part("Throughput", "perf/throughput", "{:.0f} tokens/s"),
    _Part("MFU", "perf/mfu", "{:.1f}%"),
    _Part("Peak Mem.", "perf/peak_memory", "{:.1f} GiB"),
)
_ORCHESTRATOR = (
    _Part("Time", "time/step", "{:.2f}s"),
    _Part("Reward", "reward/mean", "{:.4f}"),
    _Part("Val. Reward", "val_reward/mean", "{:.4f}"),
    _Part("Throughput", "perf/throughput", "{:.1f} tokens/s"),
    _Part("Seq. Length", "seq_len/mean", "{:.1f} tokens/sample"),
    _Part("Async Level", "batch/async_level", "{:.0f}"),
    _Part("Max. Off-Policy Level", "batch/off_policy_level/max", "{:.0f}"),
)


def trainer_line(step: int, values: Mapping[str, float]) -> str:
    """`Step 7 | Time: 1.99s | Loss: 0.0123 | …`; the level SUCCESS stands before it in the log.

    Args:
        values: metrics by name; `perf/mfu` in percent, `perf/peak_memory` in GiB. A part without its metric is left out.
    """
    return _line(step, values, _TRAINER)


def orchestrator_line(step: int, values: Mapping[str, float]) -> str:
    """`Step 28 | Time: 73.77s | Reward: 0.3887 | …`, with parts as in `trainer_line`."""
    return _line(step, values, _ORCHESTRATOR)


LineFunction = Callable[[int, Mapping[str, float]], str]

LINES: dict[str, LineFunction] = {"trainer": trainer_line, "orchestrator": orchestrator_line, "sft": trainer_line}
"""By role."""


def _line(step: int, values: Mapping[str, float], parts: Sequence[_Part]) -> str:
    shown = [f"{part.label}: {part.form.format(values[part.metric])}" for part in parts if _exists(values.get(part.metric))]
    return " | ".join([f"Step {step}", *shown])


def _exists(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
