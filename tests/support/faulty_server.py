"""Runs the real inference server with an engine that has one fault, for tests of the probe.

The engine looks for `faults/step_N` beside weights/ when it loads policy N. A directory there is loaded in place of the policy's. A
file there names one of `FAULTS`, which the engine has until it loads the next policy.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trivet.inference.main import main
from trivet.inference.worker_extension import PolicyWorkerExtension


def scale_epsilon(model: torch.nn.Module) -> Callable[[], None]:
    norms: list[Any] = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    before = [norm.variance_epsilon for norm in norms]
    for norm in norms:
        norm.variance_epsilon *= 1000

    def repair() -> None:
        for norm, epsilon in zip(norms, before, strict=True):
            norm.variance_epsilon = epsilon

    return repair


def double_positions(model: torch.nn.Module) -> Callable[[], None]:
    """Rotate each position by the angles of twice the position, as a wrong rope scaling does."""
    ropes: list[Any] = [module for module in model.modules() if hasattr(module, "cos_sin_cache")]
    caches: list[torch.Tensor] = list({id(rope.cos_sin_cache): rope.cos_sin_cache for rope in ropes}.values())
    before = [cache.clone() for cache in caches]
    for cache, whole in zip(caches, before, strict=True):
        cache.copy_(whole[(torch.arange(len(whole)) * 2) % len(whole)])

    def repair() -> None:
        for cache, whole in zip(caches, before, strict=True):
            cache.copy_(whole)

    return repair


FAULTS: dict[str, Callable[[Any], Callable[[], None]]] = {"epsilon": scale_epsilon, "rope": double_positions}
"""Each gives the model a fault and returns what takes it away."""
load_policy = PolicyWorkerExtension.load_policy
repairs: list[Callable[[], None]] = []


def load_with_fault(self: Any, directory: str) -> None:
    while repairs:
        repairs.pop()()
    fault = Path(directory).parents[1] / "faults" / Path(directory).name
    load_policy(self, str(fault) if fault.is_dir() else directory)
    if fault.is_file():
        repairs.append(FAULTS[fault.read_text()](self.model_runner.get_model()))


if __name__ == "__main__":
    PolicyWorkerExtension.load_policy = load_with_fault
    sys.exit(main())
