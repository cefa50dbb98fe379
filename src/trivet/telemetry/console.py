"""Formats the lines about a step for the console: one line per role, and sample rollouts. Nothing is printed here.

The lines have the format of prime-rl, so that its users can search their logs as before.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from trivet.wire.rollouts import Rollout

_TRAINER_PARTS = (
    ("Time", "time/step", "{:.2f}s"),
    ("Loss", "loss/mean", "{:.4f}"),
    ("Entropy", "entropy/mean", "{:.4f}"),
    ("Mismatch KL", "mismatch_kl/mean", "{:.4f}"),
    ("Grad. Norm", "optim/grad_norm", "{:.4f}"),
    ("LR", "optim/lr", "{:.2e}"),
    ("Throughput", "perf/throughput", "{:.0f} tokens/s"),
    ("MFU", "perf/mfu", "{:.1f}%"),
    ("Peak Mem.", "perf/peak_memory", "{:.1f} GiB"),
)
_PARTS = {
    "trainer": _TRAINER_PARTS,
    "sft": (*_TRAINER_PARTS[:2], ("Val. Loss", "val/loss", "{:.4f}"), *_TRAINER_PARTS[2:]),
    "orchestrator": (
        ("Time", "time/step", "{:.2f}s"),
        ("Reward", "reward/mean", "{:.4f}"),
        ("Val. Reward", "val_reward/mean", "{:.4f}"),
        ("Throughput", "perf/throughput", "{:.1f} tokens/s"),
        ("Seq. Length", "seq_len/mean", "{:.1f} tokens/sample"),
        ("Async Level", "batch/async_level", "{:.0f}"),
        ("Max. Off-Policy Level", "batch/off_policy_level/max", "{:.0f}"),
    ),
}
"""Label, metric and format of each part of a role's step line."""


def step_line(role: str, step: int, values: Mapping[str, float]) -> str:
    """Return `Step 7 | Time: 1.99s | Loss: 0.0123 | …`. It is logged with the level SUCCESS.

    Args:
        values: metrics by name; `perf/mfu` in percent, `perf/peak_memory` in GiB. A part without its metric is left out.
    """
    shown = [
        f"{label}: {template.format(values[metric])}"
        for label, metric, template in _PARTS[role]
        if math.isfinite(values.get(metric, math.nan))
    ]
    return " | ".join([f"Step {step}", *shown])


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
        max_chars: limit of characters of the prompt and of the completion. A line break in them is written as a backslash and an n.
    """
    return [
        f"=== Step {step} Sample ===",
        f"Prompt: {conversation_text(rollout.prompt, max_chars=max_chars)}",
        f"Completion: {conversation_text(rollout.completion, max_chars=max_chars)}",
        f"Reward: {rollout.reward}",
    ]


def conversation_text(messages: Sequence[Mapping[str, Any]], *, max_chars: int) -> str:
    """Return the messages as one line. If there are several, the role precedes each."""
    parts = [message_text(message) for message in messages]
    if len(parts) > 1:
        parts = [f"[{message.get('role')}] {text}" for message, text in zip(messages, parts, strict=True)]
    text = " ".join(parts).replace("\n", "\\n")
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text)} characters)"


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, and then its tool calls as `name(arguments)`."""
    content: Any = message.get("content")
    if isinstance(content, list):
        parts = cast("list[dict[str, Any]]", content)
        content = " ".join(str(part.get("text", part.get("type"))) for part in parts)
    tool_calls = cast("list[dict[str, Any]]", message.get("tool_calls") or [])
    functions = [call.get("function") or call for call in tool_calls]  # OpenAI's format nests the function, a flat one does not
    calls = [f"{function['name']}({function['arguments']})" for function in functions]
    return " ".join([*([str(content)] if content else []), *calls])
