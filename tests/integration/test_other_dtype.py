"""Run the quickstart's model in the dtype that this machine would not choose, as users of other processors do."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.histories import assert_proven
from support.rl_run import CONFIG, Run
from support.tiny_models import tiny_model_writer
from trivet.config.compute_dtype import read_choice
from trivet.history.check import check_run
from trivet.machine import Machine, inspect_machine

pytestmark = pytest.mark.vllm

MAX_STEPS = 6
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Limits torch, oneDNN and vLLM to what a processor without AVX-512 has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """The configuration for the dtype that this machine would not choose."""

    dtype: str
    environment: Mapping[str, str]
    flags: tuple[str, ...] = ()


def other_than(machine: Machine, unlimited: Machine) -> Other:
    """Return how to get the other dtype. `unlimited` is the machine without the limits that the environment sets."""
    if machine.bf16_instructions:
        return Other(dtype="float32", environment=os.environ | AVX2)
    if unlimited.bf16_instructions:
        return Other(dtype="bfloat16", environment={name: value for name, value in os.environ.items() if name not in AVX2})
    return Other(dtype="bfloat16", environment=os.environ, flags=("--trainer.model.compute-dtype", "bfloat16"))


def test_a_run_learns_in_the_dtype_that_this_machine_would_not_choose(make_run: Callable[..., Run], tmp_path: Path) -> None:
    tiny_model_writer(hidden_size=256, layers=4)(tmp_path / "model")
    template = (
        CONFIG.replace('compute_dtype = "float32"', "").replace('dtype = "float32"', "").replace("lr = 1e-2", "lr = 1e-3")
    )
    run = make_run(max_steps=MAX_STEPS, model=tmp_path / "model", template=template)
    other = other_than(inspect_machine(), inspect_machine({}))
    run.start(*other.flags, environment=other.environment)
    assert run.await_exit() == 0, run.output[-4000:]
    assert f"rl computes in {other.dtype} (" in run.output
    chosen = read_choice(run.layout.compute_dtype)
    assert chosen is not None
    assert chosen.dtype == other.dtype
    for name in ("trainer", "inference"):
        assert f'dtype = "{other.dtype}"' in (run.layout.configs / f"{name}.toml").read_text()
    assert_proven(check_run(run.layout))
    steps = [json.loads(line) for line in (run.layout.metrics / "trainer.jsonl").read_text().splitlines()]
    assert steps[0]["mismatch_kl/mean"] < 1e-3, "the first batch is of the policy that the trainer starts with"
    rewards = [json.loads(line)["reward/mean"] for line in (run.layout.metrics / "orchestrator.jsonl").read_text().splitlines()]
    assert sum(rewards[-2:]) > sum(rewards[:2])
