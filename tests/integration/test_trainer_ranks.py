"""Run real gloo ranks in separate processes. The arithmetic does not depend on their number.

A task has a name. gradients: the loss and the full gradients of every layout. train: six steps, saved after the third. resume: the
last three. lora-gradients, lora-train, lora-resume: the same with an adapter. muon-, sgd-: with another optimizer.
Rank 0 writes the results of a task to DIRECTORY/TASK_RANKS.pt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from support.ranks import run_ranks
from support.scripts import load_module
from support.shards import write_state
from trivet.config.schema.losses import DefaultLossConfig
from trivet.config.schema.model import LoRAConfig
from trivet.config.schema.trainer import (
    AdamWConfig,
    ConstantSchedule,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
    TrainerModelConfig,
)
from trivet.examples.tiny_model import make_model, make_tokenizer
from trivet.trainer.checkpoint.state import TrainerProgress, collect_state, load_part
from trivet.trainer.losses.formulas import make_policy_loss
from trivet.trainer.model.export import gather_weights
from trivet.trainer.model.policy_model import PolicyModel, load_policy
from trivet.trainer.optim.optimizer import LearningRate, make_optimizer
from trivet.trainer.ranks.world import World, barrier, broadcast_bytes, gather_tensor, open_world
from trivet.trainer.step import Learner, train_step

ORACLE = Path(__file__).parents[1] / "unit" / "trainer" / "oracle.py"
TOLERANCE = 1e-6
"""Relative tolerance in float32 (invariant 8)."""
OPTIMIZER_TOLERANCES = {"sgd": 1e-6, "muon": 1e-3}
"""Tolerance for the weights after six steps, by optimizer besides AdamW. Muon iterates in bfloat16."""
OTHERS = tuple(OPTIMIZER_TOLERANCES)

LORA = LoRAConfig(rank=3, alpha=6.0, target_modules=["q_proj", "o_proj", "down_proj"])
"""A rank that no number of ranks divides: some ranks hold nothing of a factor."""

OPTIMIZERS: dict[str, OptimizerConfig] = {"muon": MuonConfig(lr=1e-3), "sgd": SGDConfig(lr=1e-2)}

PROMPT_LENGTH = 20
"""Tokens that samples share: enough to be computed once."""

MICRO_BATCH_TOKENS = 50
"""The longest of the samples have 43: several rows for each rank, some of them dummies."""

LOSSES = {"token": DefaultLossConfig(kl_tau=0.1), "sequence": DefaultLossConfig(ratio_type="sequence", kl_tau=0.1)}


def make_learner(
    model_dir: str,
    world: World,
    *,
    optim: OptimizerConfig,
    loss: DefaultLossConfig,
    lora: LoRAConfig | None = None,
) -> Learner:
    torch.manual_seed(0)
    config = TrainerModelConfig(name=model_dir, compute_dtype="float32", fused_lm_head_chunk_size=7, lora=lora)
    model = load_policy(config, world)
    if lora is not None:
        unsettle(model)
    return Learner(
        model=model,
        optimizer=make_optimizer(model.trained_parameters, optim, matrices=model.hidden_matrices),
        learning_rate=LearningRate(peak=optim.lr, schedule=ConstantSchedule(), max_steps=None),
        loss=make_policy_loss(loss),
        max_norm=None if optim.lr == 0 else 1.0,
        world=world,
    )


def unsettle(model: PolicyModel) -> None:
    """Make the second factors of an adapter other than zero, alike on any number of ranks. Otherwise the first have no
    gradient."""
    weights = {
        name: torch.sin(torch.arange(parameter.numel(), dtype=torch.float32)).reshape(parameter.shape) * 0.02
        for name, parameter in model.named_parameters()
        if "lora_B" in name
    }
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, strict=False))


def measure_gradients(model_dir: str, oracle: ModuleType, world: World, *, lora: LoRAConfig | None) -> dict:
    results = {}
    examples = oracle.make_examples(count=9, vocab_size=100, prompt_length=PROMPT_LENGTH)
    for loss, config in LOSSES.items():
        learner = make_learner(model_dir, world, optim=AdamWConfig(lr=0.0), loss=config, lora=lora)
        layouts = oracle.layouts(examples)
        for layout, rows in {**layouts, "packed anew": layouts["one row"]}.items():
            learner.micro_batch_tokens = MICRO_BATCH_TOKENS if layout == "packed anew" else None
            result = train_step(learner, rows, step=1)
            trained = [(name, each) for name, each in learner.model.named_parameters() if each.requires_grad]
            gradients = {name: gather_tensor(parameter.grad) for name, parameter in trained}
            named = {name.removeprefix("causal_lm."): gradient for name, gradient in gradients.items()}
            kl = float(result.values["mismatch_kl"].mean()) if world.is_main else None
            results[loss, layout] = {"loss": result.loss, "norm": result.grad_norm, "gradients": named, "kl": kl}
    return results


def train(
    model_dir: str,
    oracle: ModuleType,
    world: World,
    part: Path,
    *,
    is_resumed: bool,
    lora: LoRAConfig | None,
    optim: OptimizerConfig,
) -> dict:
    learner = make_learner(model_dir, world, optim=optim, loss=LOSSES["token"], lora=lora)
    first = load_part(part, learner).step + 1 if is_resumed else 1
    losses = {}
    for step in range(first, 7):
        rows = [oracle.make_row([example]) for example in oracle.make_examples(count=5, vocab_size=100, seed=step)]
        losses[step] = train_step(learner, rows, step=step).loss
        if step == 3:
            part.mkdir(exist_ok=True)
            barrier(world)
            write_state(part, collect_state(learner, TrainerProgress(step=3)), world)
    weights = gather_weights(learner.model, dtype=torch.float32, keep=world.is_main)
    return {"losses": losses, "weights": weights}


def run_tasks(model_dir: str, oracle: ModuleType, tasks: Sequence[str], world: World) -> None:
    for task, _, name in (text.partition(":") for text in tasks):
        directory = Path(name)
        prefix, _, kind = task.rpartition("-")
        lora = LORA if prefix == "lora" else None
        optim = OPTIMIZERS.get(prefix, AdamWConfig(lr=1e-3))
        if kind == "gradients":
            results = measure_gradients(model_dir, oracle, world, lora=lora)
        else:
            part = directory / (f"{prefix}-part" if prefix else "part")
            results = train(model_dir, oracle, world, part, is_resumed=kind == "resume", lora=lora, optim=optim)
        if world.is_main:
            torch.save(results, directory / f"{task}_{world.size}.pt")


def run_on_ranks(model_dir: str, *tasks: str) -> None:
    torch.set_num_threads(1)
    with open_world(device="cpu", timeout_s=120) as world:
        assert broadcast_bytes(world, b"batch" if world.is_main else None) == b"batch"
        run_tasks(model_dir, load_module(ORACLE), tasks, world)


def run_alone(model: Path, tasks: list[str]) -> None:
    """Compute the same tasks with one rank, in this process."""
    torch.set_num_threads(1)
    with open_world(device="cpu", timeout_s=60) as world:
        run_tasks(str(model), load_module(ORACLE), tasks, world)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    make_model(tokenizer, hidden_size=64, layers=2, seed=1, tied=True).save_pretrained(directory)
    return directory


@dataclass(frozen=True, slots=True)
class Outputs:
    """Directories of the states that one and two ranks saved, and that both continued."""

    saved_by_one: Path
    saved_by_two: Path


@pytest.fixture(scope="module")
def outputs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """Compute everything with one and two ranks, in one start of them."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    run_alone(
        model, [f"train:{one}", f"lora-gradients:{one}", f"lora-train:{one}", *(f"{name}-train:{one}" for name in OTHERS)]
    )
    of_two = [f"gradients:{two}", f"resume:{one}", f"train:{two}", f"resume:{two}"]
    of_others = [task for name in OTHERS for task in (f"{name}-train:{two}", f"{name}-resume:{one}")]
    of_adapters = [f"lora-gradients:{two}", f"lora-resume:{one}", f"lora-train:{two}"]
    run_ranks(2, run_on_ranks, [str(model), *of_two, *of_adapters, *of_others], logs=two)
    run_alone(model, [f"resume:{two}", f"lora-resume:{two}"])
    return Outputs(one, two)


@pytest.fixture(scope="module")
def continued_by_four(model: Path, outputs: Outputs) -> Path:
    """Return the outputs of four ranks that continued what two ranks saved."""
    saved = outputs.saved_by_two
    run_ranks(4, run_on_ranks, [str(model), *(f"{name}-resume:{saved}" for name in OTHERS)], logs=saved)
    return saved


def check_gradients(results: dict[tuple[str, str], Any], model: Path) -> None:
    oracle = load_module(ORACLE)
    examples = oracle.make_examples(count=9, vocab_size=100, prompt_length=PROMPT_LENGTH)
    layouts = {*oracle.layouts(examples), "packed anew"}
    assert {layout for _, layout in results} == layouts
    for loss, config in LOSSES.items():
        expected_loss, expected = oracle.loss_and_gradients(model, examples, config)
        norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
        for layout in layouts:
            found = results[loss, layout]
            assert found["loss"] == pytest.approx(expected_loss, rel=TOLERANCE), (loss, layout)
            assert oracle.gradient_error(found["gradients"], expected) < TOLERANCE, (loss, layout)
            assert found["norm"] == pytest.approx(norm, rel=TOLERANCE), (loss, layout)
    kls = [found["kl"] for found in results.values()]
    assert kls == pytest.approx([kls[0]] * len(kls), rel=1e-5)


def test_loss_and_gradients_equal_the_oracle_on_two_ranks(model: Path, outputs: Outputs) -> None:
    check_gradients(torch.load(outputs.saved_by_two / "gradients_2.pt"), model)


@pytest.mark.core
def test_loss_and_gradients_equal_the_oracle_on_three_ranks(model: Path, tmp_path: Path) -> None:
    run_ranks(3, run_on_ranks, [str(model), f"gradients:{tmp_path}"], logs=tmp_path)
    check_gradients(torch.load(tmp_path / "gradients_3.pt"), model)


def test_an_adapters_loss_and_gradients_do_not_depend_on_ranks_or_packing(outputs: Outputs) -> None:
    oracle = load_module(ORACLE)
    alone, shared = (
        torch.load(outputs.saved_by_one / "lora-gradients_1.pt"),
        torch.load(outputs.saved_by_two / "lora-gradients_2.pt"),
    )
    assert alone.keys() == shared.keys()
    for loss, layout in alone:
        expected = alone[loss, "one row"]
        for found in (alone[loss, layout], shared[loss, layout]):
            assert found["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE), (loss, layout)
            assert found["norm"] == pytest.approx(expected["norm"], rel=TOLERANCE), (loss, layout)
            assert oracle.gradient_error(found["gradients"], expected["gradients"]) < TOLERANCE, (loss, layout)


@pytest.mark.parametrize("prefix", ["", "lora-"], ids=["all weights", "an adapter"])
def test_a_checkpoint_of_one_rank_continues_on_two_and_back(outputs: Outputs, prefix: str) -> None:
    unbroken = torch.load(outputs.saved_by_one / f"{prefix}train_1.pt")
    for path in (outputs.saved_by_one / f"{prefix}resume_2.pt", outputs.saved_by_two / f"{prefix}resume_1.pt"):
        resumed = torch.load(path)
        assert list(resumed["losses"]) == [4, 5, 6]
        for step, loss in resumed["losses"].items():
            assert loss == pytest.approx(unbroken["losses"][step], rel=1e-5)
        for name, weight in resumed["weights"].items():
            # Adam divides by gradients that may be tiny. Sums in another order therefore show more than in the gradient itself.
            torch.testing.assert_close(weight, unbroken["weights"][name], rtol=1e-4, atol=1e-5)


def test_two_ranks_that_resume_end_with_exactly_the_weights_of_two_that_did_not(outputs: Outputs) -> None:
    unbroken, resumed = (torch.load(outputs.saved_by_two / f"{task}_2.pt") for task in ("train", "resume"))
    for name, weight in resumed["weights"].items():
        assert torch.equal(weight, unbroken["weights"][name]), name


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_make_the_same_weights_on_any_number_of_ranks_and_across_resumes(
    outputs: Outputs, continued_by_four: Path, name: str
) -> None:
    expected = torch.load(outputs.saved_by_one / f"{name}-train_1.pt")["weights"]
    for path in (
        outputs.saved_by_two / f"{name}-train_2.pt",
        outputs.saved_by_one / f"{name}-resume_2.pt",
        continued_by_four / f"{name}-resume_4.pt",
    ):
        assert load_module(ORACLE).gradient_error(torch.load(path)["weights"], expected) < OPTIMIZER_TOLERANCES[name], path.name
