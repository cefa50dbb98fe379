"""Explains why a step cannot be finished: which rows and parameters are not finite, or what did not fit into memory.

Called by `trainer.step` on the rank that meets the failure. Nothing here lets a run go on.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from trivet.config.layout import RunLayout
from trivet.errors import Diverged, OutOfMemory, TrivetError
from trivet.trainer.device_copies import Selected, local_part
from trivet.trainer.ranks.world import World, gather_bytes
from trivet.trainer.rows import RowTensors
from trivet.weights.catalog import latest_version
from trivet.wire.batches import MicroBatch

_HUGE_ADVANTAGE = 1e4
"""If an advantage is larger, the message blames it and not the learning rate. Normalized advantages are below 10."""
_MAX_LISTED = 5
"""Rows or parameters that a message lists; it counts the rest."""
_ALLOCATOR_MESSAGES = (
    *("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
"""Texts of errors for lack of memory. Torch's allocator for the CPU, and CUDA's libraries, raise them as a plain RuntimeError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOutcome:
    """The result of forward and backward of one row, on the device."""

    row: RowTensors
    logprobs_N: torch.Tensor
    share: torch.Tensor
    """The row's share of the step's loss."""
    values: dict[str, torch.Tensor | Selected]
    """Per-token and per-sample values of the row by metric name."""


def describe_rows(outcomes: Sequence[RowOutcome], world: World) -> str:
    """List the samples, over all ranks, that made the loss infinite or NaN. Collective."""
    texts = [text for outcome in outcomes if not bool(outcome.share.isfinite()) for text in _describe_row(outcome)]
    return _list_over_ranks(texts, world) or "no row's own share is infinite, but their sum is"


def describe_gradients(parameters: Iterator[tuple[str, torch.nn.Parameter]], world: World) -> str:
    """List the parameters whose gradients are not finite on some rank. Collective."""
    names = [
        name.removeprefix("causal_lm.")
        for name, parameter in parameters
        if parameter.grad is not None and not bool(local_part(parameter.grad).isfinite().all())
    ]
    return _list_over_ranks(names, world) or "every gradient is finite, and their norm is not"


def describe_remedy(rows: Sequence[MicroBatch], *, key_prefix: str) -> str:
    """Return what the user can change after a step on the batch `rows` whose loss or gradient is not finite."""
    advantages = np.concatenate([row.advantages_T for row in rows])
    largest = advantages[np.abs(advantages).argmax()]  # a NaN, if there is one, and then no comparison with it holds
    if abs(largest) <= _HUGE_ADVANTAGE:
        return f"Lower {key_prefix}optim.lr, or look in metrics/ at what grew in the steps before"
    return (
        f"Its largest advantage is {largest:.4g}, which comes from the rewards, listed in rollouts/: bound or rescale them, or "
        'divide by their deviation with [orchestrator.advantage] type = "std_norm"'
    )


@contextmanager
def naming_last_weights(layout: RunLayout, *, await_policy: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Add the directory of the last good weights to the message of a `Diverged` that the block raises.

    Args:
        await_policy: waits until the policy of the previous step is published, so that the message can name it.
    """
    try:
        yield
    except Diverged as exc:
        unwritten = ""
        try:
            await_policy()
        except (TrivetError, OSError) as failure:  # the divergence stays the error that ends the run
            unwritten = f", and the policy after them could not be written ({failure})"
        last = latest_version(layout)
        where = "the model it started from" if last is None else str(layout.weights_step(last))
        raise Diverged(f"{exc}. Nothing was published for this step; the last good weights are {where}{unwritten}") from exc


def explaining_memory(row: RowTensors, *, chunk_size: int, key_prefix: str) -> AbstractContextManager[None]:
    """Explain how to shrink `row` when memory runs out in its forward or backward pass. `key_prefix` is that of `Learner`."""
    num_tokens, longest, num_trained = row.num_tokens, row.segments.max_key_length, len(row.targets_N)
    if row.num_samples > 1:
        shorter = f"{key_prefix}micro_batch_tokens = {max(longest, math.ceil(num_tokens / 2))}"
    else:
        shorter = f"a smaller {key_prefix}model.seq_len, such as {max(2, num_tokens // 2)}, as the row is one sample"
    return _explaining(
        f"memory ran out in a row of {num_tokens} tokens ({row.num_samples} samples, the longest of {longest} tokens, "
        f"{num_trained} tokens trained)",
        f"Set {shorter}; [{key_prefix}model.ac] freq = 1, if it is not set; "
        f"or {key_prefix}model.fused_lm_head_chunk_size = {max(1, min(chunk_size, num_trained) // 2)}",
    )


def explaining_update_memory(*, key_prefix: str) -> AbstractContextManager[None]:
    """Explain how to save memory when it runs out in the optimizer's update; see `explaining_memory`."""
    return _explaining(
        "memory ran out in the optimizer's update, whose state is made in the first step",
        f"Use more ranks, set {key_prefix}model.optim_cpu_offload = true (on a GPU), or train an adapter with "
        f"[{key_prefix}model.lora]",
    )


@contextmanager
def _explaining(failure: str, advice: str) -> Iterator[None]:
    """Turn an allocator's error into an OutOfMemory. Torch has a type for GPUs; on a CPU it raises a RuntimeError."""
    try:
        yield
    except (RuntimeError, MemoryError) as exc:
        is_known = isinstance(exc, (torch.OutOfMemoryError, MemoryError))
        if not is_known and not any(text in str(exc) for text in _ALLOCATOR_MESSAGES):
            raise
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        raise OutOfMemory(f"{failure}: {reason}. {advice}") from exc


def _describe_row(outcome: RowOutcome) -> list[str]:
    """Return a text for each sample of the row that has a value that is not finite; at least one text."""
    row = outcome.row
    columns = {
        "the model's log-probability": outcome.logprobs_N,
        "the sampler's log-probability": row.sampler_logprobs_N,
        "the advantage": row.advantages_N,
    }
    names = [f"row {index} sample {number}" for index, number in row.sample_indices] or [
        f"sample {number}" for number in range(row.num_samples)
    ]
    texts: list[str] = []
    for number, sample in enumerate(names):
        findings: list[str] = []
        for name, values_N in columns.items():
            values = values_N[row.samples_N == number]
            if len(bad := values[~values.isfinite()]):
                findings.append(f"{name} is {float(bad[0])} at {len(bad)} of {len(values)} tokens")
        if findings:
            texts.append(f"{sample}: {', '.join(findings)}")
    if not texts:
        ratio = float((outcome.logprobs_N - row.sampler_logprobs_N).max())
        texts = [f"{names[0]} or another of the row: the largest log-ratio is {ratio:.4g}"]
    return texts


def _list_over_ranks(own_texts: list[str], world: World) -> str:
    """List the texts of all ranks, each once. Collective."""
    parts = gather_bytes(world, msgspec.msgpack.encode(own_texts))
    texts = list(dict.fromkeys(text for part in parts for text in msgspec.msgpack.decode(part, type=list[str])))
    more = f", and {len(texts) - _MAX_LISTED} more" if len(texts) > _MAX_LISTED else ""
    return "; ".join(texts[:_MAX_LISTED]) + more
