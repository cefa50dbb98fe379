"""A step waits for the device twice, through two functions. Tensors on the meta device, which have no values, stand in for a GPU's.

Whatever asks such a tensor for a value raises: a scalar that is read, the number of true elements of a mask, a copy to main memory.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from trivet.config.schema.losses import DefaultLossConfig, LossConfig
from trivet.config.schema.model import TrainerModelConfig
from trivet.config.schema.trainer import ConstantSchedule, SGDConfig, TrainerConfig
from trivet.trainer import device_copies
from trivet.trainer import step as step_module
from trivet.trainer.attention.packed import HeadDims, register_attention
from trivet.trainer.device_copies import HostCopies, Selected, read_numbers, read_values, to_device
from trivet.trainer.losses.choice import CovLossConfig
from trivet.trainer.losses.custom import SampleInputs, SampleLoss
from trivet.trainer.losses.formulas import cross_entropy, make_policy_loss
from trivet.trainer.model.initial_weights import build, read_config
from trivet.trainer.model.policy_model import PolicyModel
from trivet.trainer.model.supported import find_logit_rule
from trivet.trainer.open_session import make_learner
from trivet.trainer.optim.optimizer import LearningRate, make_optimizer
from trivet.trainer.ranks.world import World, open_world
from trivet.trainer.step import Learner, train_step

META = torch.device("meta")
LOSSES: dict[str, dict[str, Any] | None] = {
    "default by token": {"type": "default"},
    "default by sample": {"type": "default", "ratio_type": "sequence"},
    "grpo": {"type": "grpo", "normalization": "sample"},
    "entropy bonus": {"type": "grpo", "entropy_coef": 0.1},
    "gspo": {"type": "gspo"},
    "luspo": {"type": "luspo"},
    "gmpo": {"type": "gmpo"},
    "sapo": {"type": "sapo"},
    "vespo": {"type": "vespo"},
    "kl_cov": {"type": "kl_cov"},
    "importance": {"type": "importance", "preset": "geometric_sequence_tis"},
    "decoupled": {"type": "decoupled"},
    "cispo": {"type": "cispo"},
    "aipo": {"type": "aipo"},
    "dppo": {"type": "dppo"},
    "ipo": {"type": "ipo"},
    "custom": {"type": "custom", "import_path": f"{__name__}.reinforce"},
    "cross-entropy": None,
}


def reinforce(inputs: SampleInputs) -> SampleLoss:
    """Compute a custom loss as a user would write it."""
    return SampleLoss(-(inputs.advantages_L * inputs.trainer_logprobs_L).sum(), {"gain": inputs.advantages_L})


@pytest.fixture(scope="module")
def meta_model(tiny_model: Path) -> PolicyModel:
    """A model without values."""
    config = TrainerModelConfig(name=str(tiny_model), compute_dtype="float32", fused_lm_head_chunk_size=7)
    hf_config = read_config(config)
    causal_lm = build(hf_config, config, dtype=torch.float32).to("meta")
    causal_lm.config._attn_implementation = register_attention(
        "sdpa", device=torch.device("cpu"), dtype=torch.float32, heads=HeadDims.from_config(hf_config)
    )
    return PolicyModel(causal_lm.train(), chunk_size=7, logit_rule=find_logit_rule(causal_lm, name=config.name))


@pytest.fixture
def meta_learner(meta_model: PolicyModel, monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes a learner whose model, gradients and rows have no values."""
    module = sys.modules.get(__name__) or importlib.import_module(__name__)
    monkeypatch.setitem(sys.modules, __name__, module)  # the custom loss is found under the name that pytest gave this module

    def make(loss: dict[str, Any] | None) -> Learner:
        config = None if loss is None else TypeAdapter[Any](LossConfig).validate_python(loss)
        world = World(rank=0, size=1, device=META, mesh=FakeMesh(), control=None, secret=None)  # type: ignore[arg-type]  # one rank
        return Learner(
            model=meta_model,
            # AdamW's fused update reads no value either, and torch has none for the meta device.
            optimizer=make_optimizer(meta_model.trained_parameters, SGDConfig(lr=1e-2)),
            learning_rate=LearningRate(peak=1e-2, schedule=ConstantSchedule(), max_steps=None),
            loss=cross_entropy if config is None else make_policy_loss(config),
            choice=config if isinstance(config, CovLossConfig) else None,
            max_norm=1.0,
            world=world,
        )

    return make


class FakeMesh:
    """The mesh of one rank."""

    ndim = 1


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the functions that may wait for the device; return the order of waits and updates."""
    events: list[str] = []

    def read_numbers(*numbers: torch.Tensor) -> list[float]:
        events.append("numbers")
        assert {number.device for number in numbers} == {META}
        return [2.0] * len(numbers)

    def read_values(parts: Any) -> dict[str, np.ndarray]:
        events.append("values")
        assert {tensor.device for part in parts for value in part.values() for tensor in _tensors(value)} == {META}
        return {}

    monkeypatch.setattr(step_module, "read_numbers", read_numbers)
    monkeypatch.setattr(step_module, "read_values", read_values)
    return events


def _tensors(value: torch.Tensor | Selected) -> list[torch.Tensor]:
    return list(value) if isinstance(value, Selected) else [value]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_a_step_waits_for_the_device_once_before_the_update_and_once_at_its_end(
    loss: dict[str, Any] | None, meta_learner, oracle, waits: list[str]
) -> None:
    learner = meta_learner(loss)
    learner.optimizer.register_step_pre_hook(lambda *_: waits.append("update"))
    rows = [oracle.make_row(oracle.make_examples(count=4, vocab_size=100, seed=seed, prompt_length=9)) for seed in range(3)]
    result = train_step(learner, rows, step=1)
    assert waits == ["numbers", "update", "values"]
    assert (result.loss, result.grad_norm) == (2.0, 2.0)


@pytest.mark.gpu
@pytest.mark.device
def test_cuda_reports_no_other_wait_in_a_step(tiny_model: Path, oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    def permitted(read: Any) -> Any:
        def run(*args: Any) -> Any:
            torch.cuda.set_sync_debug_mode("default")
            try:
                return read(*args)
            finally:
                torch.cuda.set_sync_debug_mode("error")

        return run

    rows = [oracle.make_row(oracle.make_examples(count=4, vocab_size=100, seed=seed, prompt_length=9)) for seed in range(3)]
    config = TrainerConfig.model_validate({"model": {"name": str(tiny_model)}, "optim": {"lr": 1e-2, "max_norm": 1.0}})
    with open_world(device="cuda", timeout_s=60) as world:
        learner = make_learner(config, world, loss=make_policy_loss(DefaultLossConfig()), max_steps=None)
        train_step(learner, rows, step=1)  # the first step makes what later ones use
        for name, read in (("read_numbers", read_numbers), ("read_values", read_values)):
            monkeypatch.setattr(step_module, name, permitted(read))
        torch.cuda.set_sync_debug_mode("error")
        try:
            train_step(learner, rows, step=2)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("ask", [torch.Tensor.item, torch.Tensor.cpu, torch.nonzero, bool, lambda scalar: scalar[scalar > 0]])
def test_a_tensor_of_the_meta_device_does_not_answer(ask) -> None:
    """If this fails, the test above shows nothing."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        ask(torch.ones((), device="meta"))


def test_values_of_all_rows_are_joined_and_selected_on_the_host() -> None:
    mask = torch.tensor([True, False, True])
    kl = torch.tensor([1.0, 2.0, 3.0])
    first = {"kl": kl, "masked": Selected(kl, mask), "is_masked": mask}
    second = {"kl": kl[:1] * 9, "masked": Selected(kl[:1] * 9, mask[1:2]), "late": kl[:1]}
    joined = read_values([first, {}, second])
    assert {name: values.tolist() for name, values in joined.items()} == {
        "kl": [1.0, 2.0, 3.0, 9.0],
        "masked": [1.0, 3.0],
        "is_masked": [True, False, True],
        "late": [1.0],
    }
    assert joined["kl"].dtype == np.float32
    assert joined["is_masked"].dtype == np.bool_
    assert read_values([]) == {}


def test_numbers_of_different_widths_are_read_exactly() -> None:
    assert read_numbers(torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(0.5)) == [1 / 3, 0.5]


def test_rows_for_a_gpu_go_through_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Host(torch.Tensor):
        def pin_memory(self, *_: Any) -> "Host":
            asked.append("pinned")
            return self

        def to(self, device: torch.device, *, non_blocking: bool = False) -> "Host":
            asked.append((device.type, non_blocking))
            return self

    to_device(torch.ones(2).as_subclass(Host), torch.device("cuda"))
    assert asked == ["pinned", ("cuda", True)]
    asked.clear()
    assert device_copies.to_device(np.ones(2), torch.device("cpu")).tolist() == [1.0, 1.0]
    assert asked == []


class FakeEvent:
    """Writes its name down when it is waited for."""

    def __init__(self, name: int, waited: list[int]) -> None:
        self._name, self._waited = name, waited

    def synchronize(self) -> None:
        self._waited.append(self._name)


def test_the_oldest_copies_are_waited_for_while_too_many_bytes_are_on_the_device() -> None:
    waited: list[int] = []
    copies = HostCopies(torch.device("cpu"), max_bytes=100)
    seen: list[list[int]] = []
    for name, num_bytes in enumerate([40, 40, 40, 60, 500, 1]):
        copies.keep_in_flight(FakeEvent(name, waited), num_bytes=num_bytes)
        seen.append(list(waited))
    assert seen == [[], [], [0], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_on_the_cpu_a_copy_is_there_at_once_and_converted() -> None:
    copies = HostCopies(torch.device("cpu"))
    source = torch.arange(4.0)
    target = copies.empty(source.shape, torch.bfloat16)
    copies.start(target, source, does_change=True)
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not target.is_pinned()


@pytest.mark.gpu
def test_a_copy_is_not_overtaken_by_what_changes_its_source() -> None:
    device = torch.device("cuda")
    copies = HostCopies(device)
    source = torch.ones(1 << 24, device=device)
    target = copies.empty(source.shape, source.dtype)
    copies.start(target, source, does_change=True)
    source.zero_()
    copies.wait()
    assert target.is_pinned()
    assert bool((target == 1).all())
