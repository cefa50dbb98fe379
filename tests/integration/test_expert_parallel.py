"""Run real gloo ranks that hold experts in parts (`model.ep`), in float64. A step is that of one rank."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from support.families import FAMILIES
from support.float64 import in_float64
from support.ranks import run_ranks
from support.scripts import load_module
from support.shards import write_state
from trivet.config.schema.losses import DefaultLossConfig
from trivet.config.schema.model import ActivationCheckpointConfig, TrainerModelConfig
from trivet.config.schema.trainer import AdamWConfig, ConstantSchedule, MuonConfig, SGDConfig
from trivet.trainer.checkpoint.state import TrainerProgress, collect_state, load_part
from trivet.trainer.losses.formulas import make_policy_loss
from trivet.trainer.model.export import gather_weights
from trivet.trainer.model.policy_model import PolicyModel, load_policy
from trivet.trainer.optim.optimizer import LearningRate, make_optimizer
from trivet.trainer.ranks.world import World, barrier, gather_tensor, open_world
from trivet.trainer.step import Learner, train_step
from trivet.wire.batches import MicroBatch
from trivet.wire.versions import Step

ORACLE = Path(__file__).parents[1] / "unit" / "trainer" / "oracle.py"
TOLERANCE = 1e-10
TASKS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "adamw": ("Qwen3-MoE", AdamWConfig(lr=1e-2), {}),
    "checkpoints": ("DeepSeek-V3", SGDConfig(lr=1e-2), {"ac": ActivationCheckpointConfig()}),
    "muon": ("GPT-OSS", MuonConfig(lr=1e-2), {}),
}


@contextmanager
def all_in_float64() -> Iterator[None]:
    """Compute in float64, torch's Muon too, which otherwise orthogonalises in bfloat16."""
    with in_float64(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        yield


def make_learner(models: Path, world: World, task: str, *, ep: int, cp: int = 1) -> Learner:
    family, optimizer, options = TASKS[task]
    torch.manual_seed(0)
    config = TrainerModelConfig(
        name=str(models / family), compute_dtype="float32", fused_lm_head_chunk_size=7, ep=ep, cp=cp, seq_len=128, **options
    )
    model = load_policy(config, world)
    return Learner(
        model=model,
        optimizer=make_optimizer(model.trained_parameters, optimizer, matrices=model.hidden_matrices),
        learning_rate=LearningRate(peak=1e-2, schedule=ConstantSchedule(), max_steps=None),
        loss=make_policy_loss(DefaultLossConfig()),
        max_norm=1e-3,
        world=world,
    )


def make_rows() -> list[MicroBatch]:
    oracle = load_module(ORACLE)
    return [oracle.make_row([example]) for example in oracle.make_examples(count=5, vocab_size=96, prompt_length=20)]


def gather(model: PolicyModel) -> dict[str, torch.Tensor]:
    return gather_weights(model, dtype=torch.float64, keep=True)


def gather_state(learner: Learner) -> dict[str, torch.Tensor]:
    """Return every moment of the optimizer, whole, by the parameter's name and its own."""
    return {
        f"{name} {moment}": gather_tensor(value).clone()
        for name, parameter in learner.model.named_parameters()
        for moment, value in learner.optimizer.state.get(parameter, {}).items()
        if value.ndim
    }


def compute(models: Path, world: World, *, ep: int, cp: int) -> dict[str, dict[str, Any]]:
    results = {}
    for task in TASKS:
        learner = make_learner(models, world, task, ep=ep, cp=cp)
        steps = [train_step(learner, make_rows(), step=Step(1))]
        named = learner.model.named_parameters()
        gradients = {name: gather_tensor(each.grad).clone() for name, each in named if each.grad is not None}
        steps += [train_step(learner, make_rows(), step=Step(number)) for number in (2, 3)]
        results[task] = {
            "loss": [step.loss for step in steps],
            "norm": [step.grad_norm for step in steps],
            "gradients": gradients,
            "state": gather_state(learner),
            "weights": gather(learner.model),
        }
    return results


def resume(models: Path, world: World, part: Path, *, written_at: int, read_at: int) -> dict[str, torch.Tensor]:
    """Take the first step with one number of parts, and the others, from its checkpoint, with another."""
    learner = make_learner(models, world, "adamw", ep=written_at)
    train_step(learner, make_rows(), step=Step(1))
    part.mkdir(exist_ok=True)
    barrier(world)
    write_state(part, collect_state(learner, TrainerProgress(step=1)), world)
    learner = make_learner(models, world, "adamw", ep=read_at)
    assert load_part(part, learner).step == 1
    for number in (2, 3):
        train_step(learner, make_rows(), step=Step(number))
    return gather(learner.model)


def compute_on_ranks(models: str, output: str, device: str, ep: str, cp: str) -> None:
    torch.set_num_threads(1)
    with all_in_float64(), open_world(device=device, timeout_s=120, context_size=int(cp)) as world:
        results: dict[str, Any] = compute(Path(models), world, ep=int(ep), cp=int(cp))
        if cp == "1":
            for written_at, read_at in ((int(ep), 1), (1, int(ep))):
                part = Path(output).with_name(f"part_{written_at}")
                results[f"from {written_at}"] = resume(Path(models), world, part, written_at=written_at, read_at=read_at)
        if world.is_main:
            torch.save(results, output)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        if family.name in {name for name, _, _ in TASKS.values()}:
            family.make_model().double().save_pretrained(directory / family.name)
    return directory


@pytest.fixture(scope="module")
def alone(models: Path) -> Mapping[str, dict[str, Any]]:
    with all_in_float64(), open_world(device="cpu", timeout_s=60) as world:
        return compute(models, world, ep=1, cp=1)


@pytest.mark.parametrize(
    ("device", "num_ranks", "ep", "cp"),
    [("cpu", 2, 2, 1), ("cpu", 4, 2, 1), ("cpu", 4, 4, 2), pytest.param("cuda", 2, 2, 1, marks=pytest.mark.gpu)],
)
def test_ranks_with_parts_of_the_experts_do_what_one_rank_does(
    models: Path, alone: Mapping[str, dict[str, Any]], tmp_path: Path, device: str, num_ranks: int, ep: int, cp: int
) -> None:
    output = tmp_path / "results.pt"
    run_ranks(num_ranks, compute_on_ranks, [str(models), str(output), device, str(ep), str(cp)], logs=tmp_path)
    found = torch.load(output, map_location="cpu")
    for task, expected in alone.items():
        for kind in ("loss", "norm"):
            assert found[task][kind] == pytest.approx(expected[kind], rel=TOLERANCE)
        for kind in ("gradients", "state", "weights"):
            assert found[task][kind].keys() == expected[kind].keys()
            for name, tensor in expected[kind].items():
                error = (found[task][kind][name] - tensor).abs().max()
                largest = max(float(each.abs().max()) for each in expected[kind].values())
                assert error <= TOLERANCE * largest, f"{task} {kind} {name}"
    for weights in (found[name] for name in found if name.startswith("from")):
        for name, tensor in alone["adamw"]["weights"].items():
            assert (weights[name] - tensor).abs().max() <= TOLERANCE, name
