"""Test what is done to blocks before they are sharded. tests/integration/test_trainer_levers.py tests that numbers stay."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from trivet.config.sections.model import ActivationCheckpointConfig, CompileConfig, TrainerModelConfig
from trivet.errors import ConfigError
from trivet.trainer.model import blocks
from trivet.trainer.model.blocks import blocks_of
from trivet.trainer.model.policy_model import PolicyModel, load_policy
from trivet.trainer.ranks.world import World
from trivet.trainer.rows import to_tensors


def load(directory: Path, world: World, **levers: Any) -> PolicyModel:
    return load_policy(TrainerModelConfig(name=str(directory), compute_dtype="float32", **levers), world)


def saved_bytes(model: PolicyModel, row: Any, world: World) -> int:
    """Return the bytes that autograd keeps of a forward for the backward pass, parameters aside."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter | DTensor):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = model(to_tensors(row, device=world.device))
    scores.logprobs_N.sum().backward()
    return sum(kept.values())


def test_checkpointing_keeps_less_and_selective_less_than_nothing(tiny_model: Path, world: World, oracle: Any) -> None:
    row = oracle.make_row(oracle.make_examples(count=12, vocab_size=100))
    kept = {
        name: saved_bytes(load(tiny_model, world, ac=ac), row, world)
        for name, ac in {
            "none": None,
            "norms": ActivationCheckpointConfig(mode="selective"),
            "norms and mlp": ActivationCheckpointConfig(mode="selective", targets=["norm", "mlp"]),
            "every second": ActivationCheckpointConfig(freq=2),
            "full": ActivationCheckpointConfig(),
        }.items()
    }
    assert kept["full"] < kept["every second"] < kept["none"]
    assert kept["full"] < kept["norms and mlp"] < kept["norms"] < kept["none"]


def test_a_target_that_no_block_has_is_refused_with_those_there_are(tiny_model: Path, world: World) -> None:
    config = ActivationCheckpointConfig(mode="selective", targets=["mla"])
    with pytest.raises(ConfigError, match=r"model\.ac\.targets: 'mla' is no part .* norm, attn, mlp, and .*down_proj"):
        load(tiny_model, world, ac=config)


@pytest.mark.parametrize(
    ("name", "target", "is_meant"),
    [
        ("input_layernorm", "norm", True),
        ("self_attn.q_norm", "norm", True),
        ("post_attention_layernorm", "attn", False),
        ("self_attn", "attn", True),
        ("mlp", "mlp", True),
        ("mlp.down_proj", "down_proj", True),
        ("mlp.down_proj", "mlp", False),
    ],
)
def test_targets_mean_modules_by_kind_or_by_name(name: str, target: str, is_meant: bool) -> None:
    assert blocks._is_meant(name, target) is is_meant


def test_blocks_are_found_before_and_after_sharding(tiny_model: Path, world: World) -> None:
    model = load(tiny_model, world)
    assert blocks_of(model.causal_lm) == list(model.causal_lm.model.layers)


def test_compiling_that_does_not_work_is_refused_before_training(
    tiny_model: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no g++ found")

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(ConfigError, match=r"model\.compile does not work on this machine \(cpu\): no g\+\+ found; install"):
        load(tiny_model, world, compile=CompileConfig())
