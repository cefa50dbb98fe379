"""Formats what the console shows of a step: one line per role, and rollouts. Pure.

The lines have the form that users of prime-rl search their logs for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from trivet.wire.rollouts import Rollout


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
_SFT = (*_TRAINER[:2], _Part("Val. Loss", "val/loss", "{:.4f}"), *_TRAINER[2:])
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
    """Return `Step 7 | Time: 1.99s | Loss: 0.0123 | …`; the level SUCCESS stands before it in the log.

    Args:
        values: metrics by name; `perf/mfu` in percent, `perf/peak_memory` in GiB. A part without its metric is left out.
    """
    return _line(step, values, _TRAINER)


def orchestrator_line(step: int, values: Mapping[str, float]) -> str:
    """Return `Step 28 | Time: 73.77s | Reward: 0.3887 | …`, with parts as in `trainer_line`."""
    return _line(step, values, _ORCHESTRATOR)


def sft_line(step: int, values: Mapping[str, float]) -> str:
    """Return the line of `trainer_line`, with the held-out loss of the steps that measured it."""
    return _line(step, values, _SFT)


LineFunction = Callable[[int, Mapping[str, float]], str]

LINES: dict[str, LineFunction] = {"trainer": trainer_line, "orchestrator": orchestrator_line, "sft": sft_line}
"""Formats a step's metrics, by role."""


def eval_line(version: int, values: Mapping[str, float]) -> str:
    """Return `Eval of policy 20 | reverse-text/avg@2: 0.5400 ± 0.0210 | reverse-text/pass@2: 0.6100 ± 0.0300`."""
    scores = {
        name: value
        for name, value in values.items()
        if name.rpartition("/")[2].startswith(("avg@", "pass@")) or name == "val_reward/mean"
    }
    parts = [
        f"{name.removeprefix('eval/')}: {value:.4f}"
        + (f" ± {values[margin]:.4f}" if (margin := f"{name}/ci95") in values else "")
        for name, value in scores.items()
    ]
    return " | ".join([f"Eval of policy {version}", *(parts or ["every example failed"])])


def sample_lines(step: int, rollout: Rollout, *, max_chars: int) -> list[str]:
    """Return `=== Step 5 Sample ===`, `Prompt: …`, `Completion: …`, `Reward: 1.0`, as verifiers' trainer shows them.

    Args:
        max_chars: prompt and completion are each cut to this; a line break inside them is written as a backslash and an n.
    """
    return [
        f"=== Step {step} Sample ===",
        f"Prompt: {conversation_text(rollout.prompt, max_chars=max_chars)}",
        f"Completion: {conversation_text(rollout.completion, max_chars=max_chars)}",
        f"Reward: {rollout.reward}",
    ]


def conversation_text(messages: Sequence[Mapping[str, Any]], *, max_chars: int) -> str:
    """Return the messages as one line; the role stands before each where there are several."""
    parts = [message_text(message) for message in messages]
    if len(parts) > 1:
        parts = [f"[{message.get('role')}] {text}" for message, text in zip(messages, parts, strict=True)]
    text = " ".join(parts).replace("\n", "\\n")
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text)} characters)"


def message_text(message: Mapping[str, Any]) -> str:
    """Return what a message says: its text, then its tool calls as `name(arguments)`."""
    content: Any = message.get("content")
    if isinstance(content, list):
        parts = cast("list[dict[str, Any]]", content)
        content = " ".join(str(part.get("text", part.get("type"))) for part in parts)
    calls = [f"{call['name']}({call['arguments']})" for call in map(_call, message.get("tool_calls") or [])]
    return " ".join([*([str(content)] if content else []), *calls])


def _call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the call itself: tool calls come in OpenAI's nested form and in a flat one."""
    return call.get("function") or call


def _line(step: int, values: Mapping[str, float], parts: Sequence[_Part]) -> str:
    shown = [f"{part.label}: {part.form.format(values[part.metric])}" for part in parts if _exists(values.get(part.metric))]
    return " | ".join([f"Step {step}", *shown])


def _exists(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
