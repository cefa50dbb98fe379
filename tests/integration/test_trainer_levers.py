"""Compute every loss with every lever of the trainer, on one, two and four real ranks. The arithmetic is the same (invariant
8)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pydantic import TypeAdapter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from support.losses import LOSSES_OF_PEERS
from support.ranks import TIMEOUT_S, run_ranks
from support.scripts import load_module
from support.shards import write_state
from trivet.config.schema import losses as kinds
from trivet.config.schema.model import (
    ActivationCheckpointConfig,
    ActivationOffloadConfig,
    CompileConfig,
    LoRAConfig,
    TrainerModelConfig,
)
from trivet.config.schema.trainer import AdamWConfig, ConstantSchedule
from trivet.examples.tiny_model import make_model, make_tokenizer
from trivet.trainer.checkpoint.state import TrainerProgress, collect_state, load_part
from trivet.trainer.losses.custom import SampleInputs, SampleLoss
from trivet.trainer.losses.formulas import make_policy_loss
from trivet.trainer.model import policy_model
from trivet.trainer.model.export import gather_weights
from trivet.trainer.model.policy_model import PolicyModel, load_policy
from trivet.trainer.model.reference import Reference
from trivet.trainer.optim.host_state import keep_state_on_host
from trivet.trainer.optim.optimizer import LearningRate, make_optimizer
from trivet.trainer.ranks.world import World, barrier, gather_tensor, open_world
from trivet.trainer.step import Learner, train_step

ORACLE = Path(__file__).parents[1] / "unit" / "trainer" / "oracle.py"
TOLERANCE = 1e-6
"""Relative tolerance in float32 (invariant 8)."""

LORA = LoRAConfig(rank=3, alpha=6.0, target_modules=["q_proj", "o_proj", "down_proj"])

LOSSES: dict[str, kinds.LossConfig] = {
    "default": kinds.DefaultLossConfig(kl_tau=0.1, token_mask_low=0.5, token_mask_high=3.0),
    "default of samples": kinds.DefaultLossConfig(ratio_type="sequence", kl_tau=0.1, entropy_coef=0.05),
    "cispo": kinds.CispoLossConfig(clip_high=0.5),
    "aipo": kinds.AipoLossConfig(clip_ratio=3.0),
    "grpo": kinds.GrpoLossConfig(beta=0.3),
    "grpo of samples": kinds.GrpoLossConfig(normalization="sample", entropy_coef=0.1),
    "grpo of a constant": kinds.GrpoLossConfig(normalization="constant", normalization_length=16),
    "gspo": kinds.GspoLossConfig(clip_low=0.3, clip_high=0.4, beta=0.1),
    "dppo": kinds.DppoLossConfig(dppo_mask_low=0.01, dppo_mask_high=0.01),
    "ipo": kinds.IpoLossConfig(ipo_threshold=0.01),
    "custom": kinds.CustomLossConfig(import_path="test_trainer_levers.likelihood", kwargs={"weight": 0.5}, unit="sample"),
}
PEERS: dict[str, kinds.LossConfig] = {
    **{name: TypeAdapter(kinds.LossConfig).validate_python(keys) for name, keys in LOSSES_OF_PEERS.items()},
    "importance": kinds.ImportanceLossConfig(preset="geometric_token_tis", geo_low=0.5, geo_high=2.0),
}
LEVERS_OF_PEERS = ("plain", "lora")
"""Levers with which these are computed too."""
LOSSES |= PEERS

FULL, SELECTIVE = ActivationCheckpointConfig(freq=2), ActivationCheckpointConfig(mode="selective", targets=["norm", "mlp"])

LEVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"lora": LORA},
    "checkpointed": {"ac": ActivationCheckpointConfig(), "ac_offloading": ActivationOffloadConfig()},
    "every second": {"ac": FULL},
    "selective": {"ac": SELECTIVE},
    "attention kept": {"ac": ActivationCheckpointConfig(keep=["attention"])},
    "offloaded": {"fsdp_cpu_offload": True},
    "gathered once": {"reshard_after_forward": False},
    "reduced once": {"reduce_each_row": False},
    "compiled": {"compile": CompileConfig(), "ac": ActivationCheckpointConfig()},
    "lora, checkpointed": {"lora": LORA, "ac": ActivationCheckpointConfig()},
}

RESUMED: dict[str, dict[str, Any]] = {
    "lora, checkpointed": LEVERS["lora, checkpointed"],
    "offloaded": LEVERS["offloaded"],
    "state on the host": {"optim_cpu_offload": True, "ac": SELECTIVE},
}


def likelihood(inputs: SampleInputs, *, weight: float) -> SampleLoss:
    """A custom loss."""
    return SampleLoss(-weight * (inputs.advantages_L * inputs.trainer_logprobs_L).mean())


def make_learner(model_dir: str, world: World, *, lr: float, lever: dict[str, Any]) -> Learner:
    torch.manual_seed(0)
    config = TrainerModelConfig(name=model_dir, compute_dtype="float32", fused_lm_head_chunk_size=7, **lever)
    model = load_policy(config, world)
    learner = Learner(
        model=model,
        optimizer=make_optimizer(model.trained_parameters, AdamWConfig(lr=lr)),
        learning_rate=LearningRate(peak=lr, schedule=ConstantSchedule(), max_steps=None),
        loss=make_policy_loss(LOSSES["default"]),
        max_norm=None if lr == 0 else 1.0,
        world=world,
    )
    if config.optim_cpu_offload:
        keep_state_on_host(learner.optimizer, world.device, part_bytes=10_000)
    return learner


def move(model: PolicyModel) -> None:
    """Use other weights than at the start, equal on any number of ranks."""
    moved = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            start = gather_tensor(parameter.detach())
            wave = torch.sin(torch.arange(start.numel(), dtype=torch.float32)).reshape(start.shape)
            moved[name] = start + 0.02 * wave
    set_model_state_dict(model, moved, options=StateDictOptions(full_state_dict=True, strict=False))


def default_levers(world: World) -> list[str]:
    """Return the levers without those that compile, on several ranks: each rank compiles separately, which takes longest."""
    return [lever for lever, options in LEVERS.items() if "compile" not in options or world.size == 1]


def measure_gradients(model_dir: str, oracle: ModuleType, world: World, *, levers: Sequence[str]) -> dict[tuple[str, str], Any]:
    rows = oracle.layouts(oracle.make_examples(count=7, vocab_size=100))["one row" if world.size == 1 else "uneven rows"]
    results = {}
    for lever in levers:
        learner = make_learner(model_dir, world, lr=0.0, lever=LEVERS[lever])
        reference = Reference(learner.model)
        move(learner.model)
        for name, config in LOSSES.items():
            if name in PEERS and lever not in LEVERS_OF_PEERS:
                continue
            learner.loss = make_policy_loss(config)
            learner.choice = config if isinstance(config, kinds.ClipCovLossConfig | kinds.KlCovLossConfig) else None
            learner.reference = reference if config.beta else None
            result = train_step(learner, rows, step=1)
            trained = [(path, each) for path, each in learner.model.named_parameters() if each.requires_grad]
            gradients = {path.removeprefix("causal_lm."): gather_tensor(each.grad) for path, each in trained}
            results[lever, name] = {"loss": result.loss, "norm": result.grad_norm, "gradients": gradients}
    return results


def run_steps(learner: Learner, oracle: ModuleType, *, first: int, last: int) -> None:
    for step in range(first, last + 1):
        rows = [oracle.make_row([example]) for example in oracle.make_examples(count=3, vocab_size=100, seed=step)]
        train_step(learner, rows, step=step)


def resume(model_dir: str, oracle: ModuleType, world: World, part: Path, *, lever: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of a run of four steps, and of one that was saved after the second and resumed."""
    unbroken = make_learner(model_dir, world, lr=1e-3, lever=lever)
    run_steps(unbroken, oracle, first=1, last=2)
    part.mkdir(parents=True, exist_ok=True)
    barrier(world)
    write_state(part, collect_state(unbroken, TrainerProgress(step=2)), world)
    run_steps(unbroken, oracle, first=3, last=4)
    resumed = make_learner(model_dir, world, lr=1e-3, lever=lever)
    first = load_part(part, resumed).step + 1
    run_steps(resumed, oracle, first=first, last=4)
    return {
        name: gather_weights(learner.model, dtype=torch.float32, keep=world.is_main)
        for name, learner in (("unbroken", unbroken), ("resumed", resumed))
    }


@contextmanager
def counting_allocations(*, mapped: Path) -> Iterator[dict[str, int]]:
    """Yield an object whose `peak` is the most bytes allocated at one time on the CPU within the block.

    Args:
        mapped: a file that counts for nothing when it is mapped into memory, although torch counts it as allocated.
    """
    counted: dict[str, int] = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield counted
    held, peak = 0, 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]" and abs(event.nbytes()) != mapped.stat().st_size:
            held += event.nbytes()
            peak = max(peak, held)
    counted["peak"] = peak


def measure_start(model_dir: str, world: World) -> dict[str, int]:
    config = TrainerModelConfig(name=model_dir, compute_dtype="float32")
    # What the first forward holds, that of the check of packing, is much beside a model of this size.
    with (
        counting_allocations(mapped=Path(model_dir) / "model.safetensors") as counted,
        patch.object(policy_model, "_check_packing", lambda *_, **__: None),
    ):
        model = load_policy(config, world)
    return {"peak": counted["peak"], "whole": 4 * model.num_parameters}


def run_on_ranks(model_dir: str, directory: str, num_replicas: str, *levers: str) -> None:
    """Write to DIRECTORY/levers_RANKS.pt the loss and gradients of every loss with every lever, runs that are saved and resumed
    with a lever, and what the start costs; or loss and gradients with `levers` alone."""
    oracle = load_module(ORACLE)
    torch.set_num_threads(1)
    with open_world(device="cpu", timeout_s=600, num_replicas=int(num_replicas)) as world:
        results: dict[str, Any] = {
            "gradients": measure_gradients(model_dir, oracle, world, levers=levers or default_levers(world))
        }
        if not levers:
            results["start"] = measure_start(model_dir, world)
            results["resumed"] = {
                name: resume(model_dir, oracle, world, Path(directory) / f"part-{world.size}-{index}", lever=lever)
                for index, (name, lever) in enumerate(RESUMED.items())
            }
        if world.is_main:
            torch.save(results, Path(directory) / f"levers_{world.size}.pt")


def measure(num_ranks: int, model: Path, output: Path, *, num_replicas: int, levers: Sequence[str] = ()) -> dict[str, Any]:
    """Return the results of the program's ranks."""
    words = [str(model), str(output), str(num_replicas), *levers]
    run_ranks(num_ranks, run_on_ranks, words, logs=output, timeout_s=1800 if levers else TIMEOUT_S)
    return torch.load(output / f"levers_{num_ranks}.pt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(make_tokenizer(), hidden_size=64, layers=3, seed=1, tied=True).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure(1, model, tmp_path_factory.mktemp("one"), num_replicas=1)


@pytest.fixture(scope="module")
def of_two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure(2, model, tmp_path_factory.mktemp("two"), num_replicas=1)


@pytest.fixture(scope="module")
def of_four(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of two copies of the model, each sharded over two ranks."""
    return measure(4, model, tmp_path_factory.mktemp("four"), num_replicas=2)


def differences(found: dict[tuple[str, str], Any], alone: dict[tuple[str, str], Any]) -> list[str]:
    """Return the values of `found` that differ: with a lever from the same ranks' without it, without a lever from one rank's and
    one row."""
    oracle = load_module(ORACLE)
    wrong = []
    for (lever, loss), result in found.items():
        without = "lora" if lever.startswith("lora") else "plain"
        expected = (alone if lever == without else found)[without, loss]
        error = oracle.gradient_error(result["gradients"], expected["gradients"])
        is_same = result["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE, abs=1e-9)
        if error >= TOLERANCE or not is_same or result["norm"] != pytest.approx(expected["norm"], rel=TOLERANCE):
            wrong.append(f"{lever}, {loss}: gradient {error:.1e}, loss {result['loss']} for {expected['loss']}")
    return wrong


def test_every_loss_is_something_to_learn_from_and_different_from_the_others(alone: dict[str, Any]) -> None:
    norms = [alone["gradients"]["plain", loss]["norm"] for loss in LOSSES]
    assert min(norms) > 1e-3
    assert len({round(norm, 5) for norm in norms}) == len(norms)


def test_no_lever_changes_loss_or_gradient_of_any_loss(alone: dict[str, Any]) -> None:
    assert differences(alone["gradients"], alone["gradients"]) == []


def test_no_lever_changes_loss_or_gradient_of_any_loss_on_two_ranks(alone: dict[str, Any], of_two: dict[str, Any]) -> None:
    assert differences(of_two["gradients"], alone["gradients"]) == []


def test_no_lever_changes_loss_or_gradient_of_any_loss_on_two_copies_of_two_ranks(
    alone: dict[str, Any], of_four: dict[str, Any]
) -> None:
    assert differences(of_four["gradients"], alone["gradients"]) == []


@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(2, 1), (4, 1), (4, 2)])
def test_compiled_blocks_change_nothing_on_several_ranks(
    model: Path, alone: dict[str, Any], tmp_path: Path, num_ranks: int, num_replicas: int
) -> None:
    found = measure(num_ranks, model, tmp_path, num_replicas=num_replicas, levers=["plain", "compiled"])["gradients"]
    assert len(found) == 2 * len(LOSSES) - len(PEERS)
    assert differences(found, alone["gradients"]) == []


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_run_that_resumes_with_a_lever_ends_with_the_weights_of_one_that_did_not(
    num_ranks: int, alone: dict[str, Any], of_two: dict[str, Any], of_four: dict[str, Any]
) -> None:
    runs = {1: alone, 2: of_two, 4: of_four}[num_ranks]["resumed"]
    assert runs.keys() == RESUMED.keys()
    for lever, run in runs.items():
        for name, weight in run["resumed"].items():
            assert torch.equal(weight, run["unbroken"][name]), (lever, name)


def test_no_rank_ever_holds_the_whole_model(alone: dict[str, Any], of_two: dict[str, Any], of_four: dict[str, Any]) -> None:
    """One rank holds it once. Each of two ranks, with or without a copy, holds half of it and one tensor."""
    whole = alone["start"]["whole"]
    assert whole < alone["start"]["peak"] < 1.35 * whole
    assert 0.5 * whole < of_two["start"]["peak"] < 0.85 * whole
    assert 0.5 * whole < of_four["start"]["peak"] < 0.85 * whole
