"""Run real gloo ranks that compute each row together (`model.cp`), in float64. Loss and gradients are those of one rank.

Each task is one optimizer step at learning rate 0. Rank 0 writes the results of all tasks to a file.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedConfig, Qwen3Config

from support.float64 import in_float64
from support.ranks import run_ranks
from support.scripts import load_module
from trivet.config.schema.losses import DefaultLossConfig, GspoLossConfig, LossConfig
from trivet.config.schema.model import ActivationCheckpointConfig, LoRAConfig, TrainerModelConfig
from trivet.config.schema.trainer import ConstantSchedule, SGDConfig
from trivet.trainer.losses.formulas import make_policy_loss
from trivet.trainer.measurement.fake import fake_rows
from trivet.trainer.model.blocks import find_blocks
from trivet.trainer.model.policy_model import load_policy
from trivet.trainer.model.reference import Reference
from trivet.trainer.optim.optimizer import LearningRate, make_optimizer
from trivet.trainer.ranks.world import World, gather_tensor, open_world
from trivet.trainer.rows import to_tensors
from trivet.trainer.step import Learner, train_step

FAILED, LOST = 5, 7
"""Exit codes of a rank that fails, and of one that is lost."""
ORACLE = Path(__file__).parents[1] / "unit" / "trainer" / "oracle.py"
TOLERANCE = 1e-10
VOCAB_SIZE = 100
COMMON = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
MODELS: dict[str, PreTrainedConfig] = {
    "two key heads": Qwen3Config(**COMMON, num_attention_heads=4, num_key_value_heads=2),
    "one key head": Qwen3Config(**COMMON, num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=True),
    "sinks and windows": GptOssConfig(
        **COMMON, num_attention_heads=8, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=6
    ),
}
TOKENS, SEQUENCES = DefaultLossConfig(kl_tau=0.1, beta=0.05, entropy_coef=0.01), GspoLossConfig()
TASKS: dict[str, tuple[str, LossConfig, dict]] = {
    "tokens": ("two key heads", TOKENS, {}),
    "sequences": ("one key head", SEQUENCES, {}),
    "checkpoints": ("two key heads", SEQUENCES, {"ac": ActivationCheckpointConfig()}),
    "adapter": ("two key heads", TOKENS, {"lora": LoRAConfig(rank=3)}),
    "sinks": ("sinks and windows", SEQUENCES, {}),
    "no shared prefixes": ("one key head", TOKENS, {"share_prefixes": False}),
}


def compute(models: Path, world: World, *, cp: int) -> dict[tuple[str, str], dict]:
    oracle = load_module(ORACLE)
    examples = oracle.make_examples(count=7, vocab_size=VOCAB_SIZE, prompt_length=20)
    results = {}
    for task, (name, loss, options) in TASKS.items():
        torch.manual_seed(0)
        config = TrainerModelConfig(
            name=str(models / name), compute_dtype="float32", fused_lm_head_chunk_size=7, cp=cp, seq_len=64, **options
        )
        model = load_policy(config, world)
        learner = Learner(
            model=model,
            optimizer=make_optimizer(model.trained_parameters, SGDConfig(lr=0.0), matrices=[]),
            learning_rate=LearningRate(peak=0.0, schedule=ConstantSchedule(), max_steps=None),
            loss=make_policy_loss(loss),
            max_norm=None,
            world=world,
            reference=Reference(model) if loss.beta else None,
        )
        for layout, rows in oracle.layouts(examples).items():
            result = train_step(learner, rows, step=1)
            gradients = {name: gather_tensor(each.grad) for name, each in model.named_parameters() if each.requires_grad}
            # Tokens that fill up a row count to the shares of experts, and a rank alone has none.
            values = {name: sorted(each.tolist()) for name, each in result.values.items() if not name.startswith("experts/")}
            results[task, layout] = {"loss": result.loss, "gradients": gradients, "values": values}
    return results


def compute_on_ranks(models: str, output: str, device: str, cp: str, num_replicas: str) -> None:
    torch.set_num_threads(1)
    with in_float64(), open_world(device=device, timeout_s=120, num_replicas=int(num_replicas), context_size=int(cp)) as world:
        results = compute(Path(models), world, cp=int(cp))
        if world.is_main:
            torch.save(results, output)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for seed, (name, config) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(directory / name)
    return directory


@pytest.fixture(scope="module")
def alone(models: Path) -> Mapping[tuple[str, str], dict]:
    with in_float64(), open_world(device="cpu", timeout_s=60) as world:
        return compute(models, world, cp=1)


@pytest.mark.parametrize(
    ("device", "num_ranks", "cp", "num_replicas"),
    [("cpu", 2, 2, 1), ("cpu", 4, 4, 1), ("cpu", 4, 2, 2), pytest.param("cuda", 2, 2, 1, marks=pytest.mark.gpu)],
)
def test_ranks_compute_together_what_one_rank_does(
    models: Path, alone: Mapping[tuple[str, str], dict], tmp_path: Path, device: str, num_ranks: int, cp: int, num_replicas: int
) -> None:
    output = tmp_path / "results.pt"
    run_ranks(num_ranks, compute_on_ranks, [str(models), str(output), device, str(cp), str(num_replicas)], logs=tmp_path)
    together = torch.load(output, map_location="cpu")
    assert together.keys() == alone.keys()
    for place, expected in alone.items():
        found = together[place]
        assert found["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE, abs=TOLERANCE), place
        for name, gradient in expected["gradients"].items():
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-8, atol=TOLERANCE, msg=f"{place} {name}")
        assert found["values"].keys() == expected["values"].keys()
        for name, values in expected["values"].items():
            assert found["values"][name] == pytest.approx(values, rel=1e-5, abs=1e-6), (place, name)


def lose_a_rank(model: str) -> None:
    """Compute a row, of which rank 1 does not take part in the exchange of the second layer."""
    torch.set_num_threads(1)
    with open_world(device="cpu", timeout_s=600, context_size=2) as world:
        policy = load_policy(TrainerModelConfig(name=model, compute_dtype="float32", cp=2), world)
        (row,) = fake_rows(0, seed=0, seq_len=64, vocab_size=VOCAB_SIZE, num_rows=1)
        if world.rank == 1:
            last_block = find_blocks(policy.causal_lm)[-1]
            last_block.forward = lambda *_, **__: os._exit(LOST)
        try:
            policy(to_tensors(row, device=world.device))
        except RuntimeError as exc:
            print(exc)
            sys.stdout.flush()
            os._exit(FAILED)


def test_a_rank_that_is_lost_ends_the_others_at_once(models: Path, tmp_path: Path) -> None:
    """Without the end of the connection they would wait for ten minutes."""
    run_ranks(2, lose_a_rank, [str(models / "two key heads")], logs=tmp_path, codes=[FAILED, LOST], timeout_s=120)
