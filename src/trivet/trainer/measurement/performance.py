"""What a step costs: floating-point operations, memory, and its share of the device's peak."""

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from trivet.trainer.model.policy_model import PolicyModel, has_adapter
from trivet.wire.batches import MicroBatch

_PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 operations per second, by what the device's name contains."""
_MATMUL_SIZE, _MATMUL_TRIES = 1024, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    matmul_parameters: int
    """Parameters that a token is multiplied with: neither an embedding that is only looked up, nor experts it is not sent to."""
    frozen_parameters: int = 0
    """Of those; they get no gradient of their own."""
    num_layers: int
    attention_width: int
    """Query heads times head dimension."""
    hidden_size: int

    def flops(self, sequence_lengths: Sequence[int]) -> float:
        """Forward and backward of samples of these lengths; attention counted causally, recomputation not at all."""
        tokens, squares = sum(sequence_lengths), sum(length * length for length in sequence_lengths)
        of_parameters = 6.0 * self.matmul_parameters - 2.0 * self.frozen_parameters
        return of_parameters * tokens + 6.0 * self.num_layers * self.attention_width * squares

    def reference_flops(self, *, num_tokens: int, seq_len: int) -> float:
        """The same by the formula of prime-rl's published figures, to be compared with them.

        It counts every token as the last of a row of `seq_len`, attention without its causal half, and the hidden size as the
        width of the heads.

        Source: prime-rl's MFU counter; its figures of January 2026 come out when the parameters are those counted here.
        """
        of_parameters = 6.0 * self.matmul_parameters - 2.0 * self.frozen_parameters
        return (of_parameters + 12.0 * self.num_layers * self.hidden_size * seq_len) * num_tokens


def model_cost(model: PolicyModel) -> ModelCost:
    config = model.causal_lm.config
    assert isinstance(config, PreTrainedConfig)
    is_tied = model.embedding.weight is model.head.weight
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    used = {name: _count_used(name, parameter, config) for name, parameter in model.named_parameters()}
    matmul_parameters = sum(used.values()) - (0 if is_tied else model.embedding.weight.numel())
    num_trained = sum(used[name] for name, parameter in model.named_parameters() if parameter.requires_grad)
    return ModelCost(
        matmul_parameters=matmul_parameters,
        frozen_parameters=matmul_parameters - num_trained if has_adapter(model.causal_lm) else 0,
        num_layers=config.num_hidden_layers,
        attention_width=config.num_attention_heads * head_dim,
        hidden_size=config.hidden_size,
    )


def _count_used(name: str, parameter: torch.nn.Parameter, config: PreTrainedConfig) -> int:
    """Its numbers that one token is multiplied with: of a mixture's experts those that the token is sent to."""
    if ".experts." not in name:
        return parameter.numel()
    # Mixtral's name of it, which later models share, and Qwen3-MoE's.
    num_experts = getattr(config, "num_local_experts", None) or config.num_experts
    return parameter.numel() * config.num_experts_per_tok // num_experts


def peak_flops(device: torch.device) -> float | None:
    """The device's bf16 peak, None when it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of square matrix products: what stands for the peak of a device that has no entry in a table."""
    size = _MATMUL_SIZE if device.type == "cpu" else 4 * _MATMUL_SIZE
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(_MATMUL_TRIES):
        with Stopwatch(device) as watch:
            torch.matmul(left, right)
        best = max(best, 2.0 * size**3 / watch.seconds)
    return best


class Stopwatch:
    """Times what is done within it, up to the moment at which the device has done it.

    >>> with Stopwatch(device) as watch:
    ...     torch.matmul(left, right)
    >>> watch.seconds
    0.0123
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = 0.0
        self.seconds = 0.0

    def __enter__(self) -> "Stopwatch":
        self._wait()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self._started

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def total_memory_gib(device: torch.device) -> float:
    """What the device has; on the CPU, what the machine has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def peak_memory_gib(device: torch.device) -> float:
    """Largest so far: of the device's allocator, on the CPU of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def speed_metrics(
    cost: ModelCost, rows: Sequence[MicroBatch], *, seconds: float, num_ranks: int, device: torch.device
) -> dict[str, float]:
    """Metrics under `perf/` of a step that took `seconds`."""
    lengths = [int(length) for row in rows for length in row.sequence_lengths_S]
    throughput = sum(lengths) / seconds
    metrics = {
        "perf/throughput": throughput,
        "perf/throughput_per_gpu": throughput / num_ranks,
        "perf/peak_memory": peak_memory_gib(device),
    }
    if peak := peak_flops(device):
        metrics["perf/mfu"] = 100.0 * cost.flops(lengths) / (seconds * peak * num_ranks)
    return metrics
