"""One rank of tests/integration/test_trainer_ranks.py: `trainer_rank_program.py MODEL_DIR ORACLE TASK:DIRECTORY…`.

gradients: the loss and the full gradients of every layout. train: six steps, saved after the third. resume: the last three.
lora-gradients, lora-train, lora-resume: the same with an adapter. muon-, sgd-: with another optimizer.
Rank 0 writes the results of a task to DIRECTORY/TASK_RANKS.pt.
"""

import sys
from pathlib import Path
from types import ModuleType

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from support.scripts import load_module
from trivet.config.schema.model import LoRAConfig
from trivet.config.schema.trainer import (
    AdamWConfig,
    ConstantSchedule,
    DefaultLossConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
    TrainerModelConfig,
)
from trivet.trainer.checkpoint.state import TrainerProgress, load_part, state_of, write_state
from trivet.trainer.losses.select import make_policy_loss
from trivet.trainer.model.export import gather_weights
from trivet.trainer.model.policy_model import PolicyModel, load_policy
from trivet.trainer.optim.optimizer import LearningRate, make_optimizer
from trivet.trainer.ranks.world import World, barrier, broadcast_bytes, gather_tensor, open_world
from trivet.trainer.step import Learner, train_step

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
            write_state(part, state_of(learner, TrainerProgress(step=3)), world.control)
    weights = gather_weights(learner.model, dtype=torch.float32, keep=world.is_main)
    return {"losses": losses, "weights": weights}


def run_tasks(model_dir: str, oracle: ModuleType, tasks: list[str], world: World) -> None:
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


def main() -> None:
    model_dir, oracle_path, *tasks = sys.argv[1:]
    torch.set_num_threads(1)
    with open_world(device="cpu", timeout_s=120) as world:
        assert broadcast_bytes(world, b"batch" if world.is_main else None) == b"batch"
        run_tasks(model_dir, load_module(Path(oracle_path)), tasks, world)


if __name__ == "__main__":
    main()
