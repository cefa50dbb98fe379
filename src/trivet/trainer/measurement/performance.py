"""Measures the cost of a step: floating-point operations, memory, and the share of the device's peak that it reaches.

Called by `trainer.step`, which balances ranks by operations, by `trainer.session` for metrics, and by the benchmark.
"""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from trivet import machine
from trivet.trainer.model.policy_model import PolicyModel, has_adapter
from trivet.wire.batches import MicroBatch

_PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 operations per second, by a text that the device's name contains."""
_MATMUL_SIZE, _MATMUL_TRIES = 1024, 12
"""Rows of the square matrices that are multiplied on a CPU to measure its peak, and how often; the best try counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """The numbers of a model from which operations are counted."""

    matmul_parameters: int
    """Parameters in the matrix products of one token. An embedding that is only looked up, and unused experts, do not count."""
    frozen_parameters: int = 0
    """How many of `matmul_parameters` get no gradient."""
    num_layers: int
    attention_width: int
    """Query heads times head dimension."""
    hidden_size: int

    def flops(self, lengths: Sequence[int], prefix_lengths: Sequence[int] | None = None) -> float:
        """Count the operations of forward and backward for segments of these lengths, with causal attention, without recomputation.

        Args:
            prefix_lengths: for each segment the tokens before it, which other segments compute; None: segments are whole samples.
        """
        prefix_lengths = prefix_lengths or [0] * len(lengths)
        squares = sum((prefix + length) ** 2 - prefix**2 for length, prefix in zip(lengths, prefix_lengths, strict=True))
        attention_flops = 6.0 * self.num_layers * self.attention_width * squares
        return self._product_flops * sum(lengths) + attention_flops

    def reference_flops(self, *, num_tokens: int, seq_len: int) -> float:
        """Count the operations by the formula of prime-rl's published figures, for a comparison with them.

        The formula treats every token as the last of a row of `seq_len`, does not halve attention for causality, and uses the
        hidden size as the width of the heads.

        Source: prime-rl's MFU counter. With the parameters counted here it gives prime-rl's figures of January 2026.
        """
        return (self._product_flops + 12.0 * self.num_layers * self.hidden_size * seq_len) * num_tokens

    @property
    def _product_flops(self) -> float:
        """Operations of one token in products with parameters: two a parameter forward, two for each of the two gradients."""
        return 6.0 * self.matmul_parameters - 2.0 * self.frozen_parameters


def model_cost(model: PolicyModel) -> ModelCost:
    """Read the cost from the model's configuration and parameters."""
    config = model.causal_lm.config
    assert isinstance(config, PreTrainedConfig)
    is_tied = model.embedding.weight is model.head.weight
    num_heads = getattr(config, "num_attention_heads", None) or 0  # a model of state-space layers alone has none
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, num_heads)
    used = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for name in (name for name in used if ".experts." in name):  # only the experts that compute a token count
        # Mixtral's name for the number of experts, which later models share, or Qwen3-MoE's.
        num_experts = getattr(config, "num_local_experts", None) or config.num_experts
        used[name] = used[name] * config.num_experts_per_tok // num_experts
    matmul_parameters = sum(used.values()) - (0 if is_tied else model.embedding.weight.numel())
    num_trained = sum(used[name] for name, parameter in model.named_parameters() if parameter.requires_grad)
    return ModelCost(
        matmul_parameters=matmul_parameters,
        frozen_parameters=matmul_parameters - num_trained if has_adapter(model.causal_lm) else 0,
        num_layers=config.num_hidden_layers,
        attention_width=num_heads * head_dim,
        hidden_size=config.hidden_size,
    )


def peak_flops(device: torch.device) -> float | None:
    """Return the device's bf16 peak, in operations per second; None when it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the operations per second of square matrix products: the peak of a device that the table does not have."""
    size = _MATMUL_SIZE if device.type == "cpu" else 4 * _MATMUL_SIZE
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / min(measure_seconds(lambda: torch.matmul(left, right), device) for _ in range(_MATMUL_TRIES))


def measure_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `device` takes for `work`, when it is idle before."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def total_memory_gib(device: torch.device) -> float:
    """Return the GiB of the device or, on the CPU, of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    return machine.total_memory_gib()


def peak_memory_gib(device: torch.device) -> float:
    """Return the largest use so far, in GiB: of the device's allocator or, on the CPU, of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def speed_metrics(
    rows: Sequence[MicroBatch],
    *,
    num_computed_tokens: int,
    flops: float,
    seconds: float,
    num_ranks: int,
    device: torch.device,
) -> dict[str, float]:
    """Return the metrics under `perf/` of a step that took `seconds`.

    Args:
        rows: the batch. Each of its tokens counts for the throughput, a shared one once for each sample that has it.
        num_computed_tokens, flops: of the step, on all ranks (`StepResult`).
    """
    throughput = sum(row.num_tokens for row in rows) / seconds
    metrics = {
        "perf/throughput": throughput,
        "perf/throughput_per_gpu": throughput / num_ranks,
        "perf/computed_tokens": float(num_computed_tokens),
        "perf/peak_memory": peak_memory_gib(device),
    }
    if peak := peak_flops(device):
        metrics["perf/mfu"] = 100.0 * flops / (seconds * peak * num_ranks)
    return metrics
