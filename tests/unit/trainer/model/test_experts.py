"""Replayed experts are those that compute a row, the routers keep their gradient, and tokens per expert are counted."""

from pathlib import Path

import numpy as np
import pytest
import torch

from support.families import FAMILIES, Family
from trivet.config.schema.model import TrainerModelConfig
from trivet.errors import ConfigError
from trivet.trainer.model.blocks import find_blocks
from trivet.trainer.model.experts import describe_shares, find_experts
from trivet.trainer.model.policy_model import PolicyModel, load_policy
from trivet.trainer.ranks.world import World
from trivet.trainer.rows import plan_rows
from trivet.trainer.step import train_step
from trivet.wire.batches import MicroBatch
from trivet.wire.experts import UNKNOWN, RoutedExperts

MIXTURES = ("Qwen3-MoE", "Qwen2-MoE", "Qwen3-Next", "GPT-OSS", "Mixtral", "OLMoE", "GLM-4-MoE", "DeepSeek-V3", "Nemotron 3")
OFTEN = ("Qwen3-MoE", "GPT-OSS", "DeepSeek-V3")
every_mixture = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.key, marks=[] if family.name in OFTEN else [pytest.mark.slow])
        for family in FAMILIES
        if family.name in MIXTURES
    ],
)
NUM_EXPERTS, NUM_CHOSEN = 4, 2


def record_choice(model: PolicyModel) -> dict[int, list[torch.Tensor]]:
    """Record what each block's experts are given from now on, by the index of the block."""
    recorded: dict[int, list[torch.Tensor]] = {}
    for index, block in enumerate(find_blocks(model.causal_lm)):
        for module in block.modules():
            if (experts := find_experts(module)) is not None:
                recorded[index] = []
                experts.register_forward_pre_hook(lambda _, args, chosen=recorded[index]: chosen.append(args[1]))
    return recorded


def give_experts(rows: list[MicroBatch], experts_TLK: np.ndarray) -> None:
    """Give each sample of `rows` its part of `experts_TLK`, without those of its last token."""
    start = 0
    for row in rows:
        row.experts_S = []
        for length in row.sequence_lengths_S.tolist():
            row.experts_S.append(RoutedExperts.compress(experts_TLK[start : start + length - 1]))
            start += length


def gradients(model: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_mixture
def test_experts_of_the_model_itself_change_nothing_and_others_compute_the_row(
    family: Family, make_learner, oracle, tmp_path: Path
) -> None:
    learner = make_learner(family.save(tmp_path))
    learner.model.eval()
    recorded = record_choice(learner.model)
    packed = learner.model.packs
    rows = [oracle.make_row(examples) for examples in ([[e] for e in oracle.make_examples(count=2, vocab_size=96)])]
    own = train_step(learner, rows, step=1)
    expected = gradients(learner.model)
    num_blocks = len(find_blocks(learner.model.causal_lm))
    num_tokens = sum(row.num_tokens for row in rows)
    plan = plan_rows(rows, num_ranks=1, packs=packed)
    assert [len(row) for row in plan.rows_by_rank[0]] == [1, 1]
    order = [index for ((index, _),) in plan.rows_by_rank[0]]
    chosen_TLK = np.zeros((num_tokens, num_blocks, NUM_CHOSEN), dtype=np.int64)
    for index, parts in recorded.items():
        by_row = dict(zip(order, parts, strict=True))
        chosen_TLK[:, index] = torch.cat([by_row[0], by_row[1]]).numpy()
        parts.clear()
    give_experts(rows, chosen_TLK)
    replayed = train_step(learner, rows, step=2)
    assert replayed.loss == pytest.approx(own.loss, rel=1e-6)
    found = gradients(learner.model)
    routers = [name for name in found if ("gate.weight" in name or "router.weight" in name) and "shared" not in name]
    assert routers
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
        assert name not in routers or gradient.abs().max() > 0

    others_TLK = (chosen_TLK + 1) % NUM_EXPERTS
    give_experts(rows, others_TLK)
    for parts in recorded.values():
        parts.clear()
    moved = train_step(learner, rows, step=3)
    assert abs(moved.loss - own.loss) > 1e-3
    lengths = [row.num_tokens for row in rows]
    for index, parts in recorded.items():
        by_row = dict(zip(order, parts, strict=True))
        start = 0
        for number, length in enumerate(lengths):
            known = np.sort(others_TLK[start : start + length - 1, index], axis=-1)
            np.testing.assert_array_equal(by_row[number].sort(dim=-1).values.numpy()[:-1], known)
            start += length
    assert any(gradient.abs().max() > 0 for name, gradient in gradients(learner.model).items() if name in routers)


def test_the_router_chooses_where_experts_are_not_known(make_learner, oracle, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "Qwen3-MoE")
    learner = make_learner(family.save(tmp_path))
    row = oracle.make_row(oracle.make_examples(count=2, vocab_size=96))
    own = train_step(learner, [row], step=1)
    row.experts_S = [
        RoutedExperts(shape=(0, 2, NUM_CHOSEN), item_bytes=1, data=RoutedExperts.compress(np.zeros((0, 2, 2))).data),
        None,
    ]
    [tensors] = plan_rows([row], num_ranks=1).take(0, device=torch.device("cpu"))
    assert tensors.experts_ULK is not None
    assert (tensors.experts_ULK == UNKNOWN).all()
    assert train_step(learner, [row], step=2).loss == pytest.approx(own.loss, rel=1e-6)


@pytest.mark.parametrize(("shape", "message"), [((1, 2), "block"), ((2, 3), "3 experts a token")])
def test_experts_of_another_model_are_refused(
    shape: tuple[int, int], message: str, make_learner, oracle, tmp_path: Path
) -> None:
    family = next(family for family in FAMILIES if family.name == "Qwen3-MoE")
    learner = make_learner(family.save(tmp_path))
    row = oracle.make_row(oracle.make_examples(count=1, vocab_size=96))
    give_experts([row], np.tile(np.arange(shape[1]), (row.num_tokens, shape[0], 1)))
    with pytest.raises(ConfigError, match=message):
        train_step(learner, [row], step=1)


def test_metrics_have_the_shares_of_a_steps_tokens(make_learner, oracle, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "Qwen3-MoE")
    learner = make_learner(family.save(tmp_path))
    recorded = record_choice(learner.model)
    result = train_step(learner, [oracle.make_row(oracle.make_examples(count=3, vocab_size=96))], step=1)
    counts = [np.bincount(torch.cat(parts).flatten().numpy(), minlength=NUM_EXPERTS) for parts in recorded.values()]
    largest = [counts_E.max() / counts_E.sum() for counts_E in counts]
    np.testing.assert_allclose(result.values["experts/largest_share"], largest)
    np.testing.assert_allclose(result.values["experts/load"], np.array(largest) * NUM_EXPERTS)
    assert (result.values["experts/entropy"] < 1).all()


def test_equal_shares_have_entropy_and_load_1() -> None:
    values = describe_shares([np.array([5.0, 5.0, 5.0, 5.0]), np.array([7.0, 0.0, 0.0, 0.0])])
    np.testing.assert_allclose(values["experts/entropy"], [1.0, 0.0], atol=1e-9)
    np.testing.assert_allclose(values["experts/load"], [1.0, 4.0])


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_each_implementation_of_experts_computes_the_same(
    implementation: str, world: World, oracle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    directory = next(family for family in FAMILIES if family.name == "Qwen3-MoE").save(tmp_path)
    row = oracle.make_row(oracle.make_examples(count=2, vocab_size=96))
    scores = []
    for name in ("auto", implementation):
        options = {"name": str(directory), "compute_dtype": "float32", "experts_implementation": name}
        model = load_policy(TrainerModelConfig.model_validate(options), world)
        [tensors] = plan_rows([row], num_ranks=1).take(0, device=torch.device("cpu"))
        scores.append(model(tensors).logprobs_N)
    assert f"experts are multiplied by {implementation}" in caplog.text
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-5)
