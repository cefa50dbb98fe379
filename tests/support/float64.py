"""Lets a trainer compute in float64, for tests that compare ranks with each other."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from trivet.trainer.model import policy_model

# Models compute some steps in float32 whatever their dtype. By default results of MKL depend on the length and alignment of what it
# computes, so parts of a row would differ from the row by 1e-8. MKL reads the variable when it is used first; ranks inherit it.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute in float64, which no configuration offers. Torch's grouped products of experts do not take it."""
    build = policy_model.build

    def build_with_loops(*args: Any, **options: Any) -> PreTrainedModel:
        causal_lm = build(*args, **options)
        causal_lm.set_experts_implementation("eager")
        return causal_lm

    with (
        patch.object(policy_model, "torch_dtype", lambda name: torch.float64),
        patch.object(policy_model, "_MAX_PACKING_ERROR", {torch.float64: 1e-8}),
        patch.object(policy_model, "build", build_with_loops),
    ):
        yield
