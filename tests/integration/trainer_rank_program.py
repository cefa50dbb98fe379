"""One rank of tests/integration/test_trainer_ranks.py: `trainer_rank_program.py MODEL_DIR ORACLE TASK:DIRECTORY…`.

gradients: the loss and the full gradients of every layout. train: six steps, saved after the third. resume: the last three.
Rank 0 writes the results of a task to DIRECTORY/TASK_RANKS.pt.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

from trivet.config.losses import DefaultLossConfig
from trivet.config.trainer import AdamWConfig, ConstantSchedule, TrainerModelConfig
from trivet.trainer.checkpoint import Progress, load_half, state_of, write_state
from trivet.trainer.distributed import World, barrier, broadcast_bytes, open_world
from trivet.trainer.export import gather_weights
from trivet.trainer.losses.select import make_policy_loss
from trivet.trainer.model import load_policy
from trivet.trainer.optimizer import LearningRate, make_optimizer
from trivet.trainer.step import Learner, train_step

LOSSES = {"token": DefaultLossConfig(kl_tau=0.1), "sequence": DefaultLossConfig(ratio_type="sequence", kl_tau=0.1)}


def load_oracle(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("oracle", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["oracle"] = module
    spec.loader.exec_module(module)
    return module


def make_learner(model_dir: str, world: World, *, lr: float, loss: DefaultLossConfig) -> Learner:
    model = load_policy(TrainerModelConfig(name=model_dir, compute_dtype="float32", fused_lm_head_chunk_size=7), world)
    return Learner(
        model=model,
        optimizer=make_optimizer(model.parameters(), AdamWConfig(lr=lr)),
        learning_rate=LearningRate(peak=lr, schedule=ConstantSchedule(), max_steps=None),
        loss=make_policy_loss(loss),
        max_norm=None if lr == 0 else 1.0,
        world=world,
    )


def measure_gradients(model_dir: str, oracle: ModuleType, world: World) -> dict:
    results = {}
    examples = oracle.make_examples(count=9, vocab_size=100)
    for loss, config in LOSSES.items():
        learner = make_learner(model_dir, world, lr=0.0, loss=config)
        for layout, rows in oracle.layouts(examples).items():
            result = train_step(learner, rows, step=1)
            gradients = {name: parameter.grad.full_tensor() for name, parameter in learner.model.named_parameters()}
            named = {name.removeprefix("causal_lm."): gradient for name, gradient in gradients.items()}
            kl = float(result.values["mismatch_kl"].mean()) if world.is_main else None
            results[loss, layout] = {"loss": result.loss, "norm": result.grad_norm, "gradients": named, "kl": kl}
    return results


def train(model_dir: str, oracle: ModuleType, world: World, directory: Path, *, is_resumed: bool) -> dict:
    learner = make_learner(model_dir, world, lr=1e-3, loss=LOSSES["token"])
    half = directory / "half"
    first = load_half(half, learner).step + 1 if is_resumed else 1
    losses = {}
    for step in range(first, 7):
        rows = [oracle.make_row([example]) for example in oracle.make_examples(count=5, vocab_size=100, seed=step)]
        losses[step] = train_step(learner, rows, step=step).loss
        if step == 3:
            half.mkdir(exist_ok=True)
            barrier(world)
            write_state(half, state_of(learner, Progress(step=3)), world.control)
    weights = gather_weights(learner.model, dtype=torch.float32, keep=world.is_main)
    return {"losses": losses, "weights": weights}


def run_tasks(model_dir: str, oracle: ModuleType, tasks: list[str], world: World) -> None:
    for task, _, name in (text.partition(":") for text in tasks):
        directory = Path(name)
        if task == "gradients":
            results = measure_gradients(model_dir, oracle, world)
        else:
            results = train(model_dir, oracle, world, directory, is_resumed=task == "resume")
        if world.is_main:
            torch.save(results, directory / f"{task}_{world.size}.pt")


def main() -> None:
    model_dir, oracle_path, *tasks = sys.argv[1:]
    torch.set_num_threads(1)
    with open_world(device="cpu", timeout_s=120) as world:
        assert broadcast_bytes(world, b"batch" if world.is_main else None) == b"batch"
        run_tasks(model_dir, load_oracle(oracle_path), tasks, world)


if __name__ == "__main__":
    main()
