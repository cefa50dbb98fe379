import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM, LlamaConfig

from trivet.config.schema.losses import DefaultLossConfig
from trivet.config.schema.model import TrainerModelConfig
from trivet.trainer import cpu
from trivet.trainer.cpu import Lanes, MasterCasts
from trivet.trainer.model.policy_model import load_policy
from trivet.trainer.ranks.world import World, gather_tensor
from trivet.trainer.step import train_step

TOLERANCE = 1e-6
"""Relative tolerance in float32 (invariant 8)."""


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_lanes", [2, 3])
def test_loss_and_gradients_equal_the_oracle(tiny_model: Path, make_learner, oracle, num_lanes: int) -> None:
    examples = oracle.make_examples(count=9, vocab_size=100)
    loss = DefaultLossConfig(kl_tau=0.1)
    expected_loss, expected = oracle.loss_and_gradients(tiny_model, examples, loss)
    learner = make_learner(tiny_model, loss=loss)
    learner.model.lanes = Lanes(num_lanes)
    for max_tokens in (None, 40, 1):  # rows that lanes share, rows beside samples too long for a lane, only such samples
        learner.micro_batch_tokens = max_tokens
        for name, rows in oracle.layouts(examples).items():
            result = train_step(learner, rows, step=1)
            gradients = {name.removeprefix("causal_lm."): gather_tensor(p.grad) for name, p in learner.model.named_parameters()}
            assert result.loss == pytest.approx(expected_loss, rel=TOLERANCE), (max_tokens, name)
            assert oracle.gradient_error(gradients, expected) < TOLERANCE, (max_tokens, name)


def test_rows_of_master_weights_follow_every_update(tiny_model: Path, make_learner, oracle) -> None:
    """In bf16, the casts are made once and read by all lanes."""
    rows = oracle.layouts(oracle.make_examples(count=15, vocab_size=100))["a row each"]
    losses = {}
    for num_lanes in (1, 2):
        learner = make_learner(tiny_model, compute_dtype="bfloat16", lr=1e-2)
        learner.model.lanes = Lanes(num_lanes)
        losses[num_lanes] = [train_step(learner, rows, step=step).loss for step in range(1, 6)]
    assert losses[1][-1] < losses[1][0] - 0.1, "it learns"
    assert losses[2] == pytest.approx(losses[1], rel=1e-2)


def test_rows_are_computed_at_the_same_time_with_a_share_of_the_threads_each(four_threads: None) -> None:
    meeting = threading.Barrier(2)

    def compute(row: int) -> tuple[int, int]:
        meeting.wait(timeout=30)  # nobody comes where rows follow each other
        return row, torch.get_num_threads()

    assert Lanes(2).map(compute, [5, 6, 7, 8]) == [(5, 2), (6, 2), (7, 2), (8, 2)]
    assert torch.get_num_threads() == 4
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    seen: list[int] = []
    other.start()
    other.join()
    assert seen == [4], "other threads keep all"


def test_what_a_row_raises_reaches_the_caller() -> None:
    def compute(row: int) -> int:
        if row % 2:
            raise ValueError(row)
        return row

    with pytest.raises(ValueError, match=r"^1$"):
        Lanes(2).map(compute, range(4))


def test_there_are_as_many_lanes_as_rows_can_feed_and_one_where_order_matters(four_threads: None) -> None:
    assert [Lanes.for_rows(seq_len=seq_len).count for seq_len in (512, 2047, 2048, 3072, 1 << 20)] == [1, 1, 2, 3, 4]
    torch.use_deterministic_algorithms(True)
    try:
        assert Lanes.for_rows(seq_len=1 << 20).count == 1
    finally:
        torch.use_deterministic_algorithms(False)


def test_all_lanes_together_take_the_memory_of_one_row() -> None:
    assert [Lanes(3).max_tokens(longest) for longest in (3, 100)] == [1, 34]


def test_blocks_that_are_computed_again_are_so_in_their_own_lane(tiny_model: Path, make_learner, oracle, world: World) -> None:
    rows = oracle.layouts(oracle.make_examples(count=9, vocab_size=100))["a row each"]
    learner = make_learner(tiny_model)
    train_step(learner, rows, step=1)
    expected = [parameter.grad for parameter in learner.model.parameters()]
    config = {"name": str(tiny_model), "compute_dtype": "float32", "ac": {"freq": 1}}
    learner.model = load_policy(TrainerModelConfig.model_validate(config), world)
    learner.model.lanes = Lanes(2)
    for _ in range(5):
        learner.model.zero_grad()
        train_step(learner, rows, step=1)
        for ours, parameter in zip(expected, learner.model.parameters(), strict=True):
            assert (parameter.grad - ours).norm() <= 1e-5 * ours.norm() + 1e-9


def test_blocks_are_computed_again_in_the_dtype_of_the_first_time(tiny_model: Path, make_learner, oracle, world: World) -> None:
    rows = oracle.layouts(oracle.make_examples(count=9, vocab_size=100))["a row each"]
    learner = make_learner(tiny_model, compute_dtype="bfloat16")
    plain = train_step(learner, rows, step=1).loss
    expected = [gather_tensor(parameter.grad) for parameter in learner.model.parameters()]
    config = {"name": str(tiny_model), "compute_dtype": "bfloat16", "ac": {"freq": 1}}
    learner.model = load_policy(TrainerModelConfig.model_validate(config), world)
    assert train_step(learner, rows, step=1).loss == pytest.approx(plain, rel=1e-2)
    for ours, parameter in zip(expected, learner.model.parameters(), strict=True):
        assert (gather_tensor(parameter.grad) - ours).norm() <= 0.05 * ours.norm() + 1e-6


@pytest.mark.parametrize("added_at_once", [7, 1 << 17], ids=["a part at a time", "at once"])
def test_modules_compute_with_casts_and_parameters_get_their_gradients(
    added_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_ADDED_AT_ONCE", added_at_once)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    config = LlamaConfig(vocab_size=50, pad_token_id=3, tie_word_embeddings=True, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.model.norm.weight.requires_grad_(False)
    casts = MasterCasts(list(model.parameters()), torch.bfloat16)
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = {name: torch.zeros_like(value) for name, value in masters.items()}
    for seed in (1, 2):
        ids_1T = torch.randint(0, 9, (1, 40), generator=torch.Generator().manual_seed(seed))
        with casts:
            logits = model(input_ids=ids_1T, use_cache=False).logits
        logits.float().square().mean().backward()
        leaves = {name: value.bfloat16().requires_grad_() for name, value in masters.items()}
        alone = functional_call(model, leaves, kwargs={"input_ids": ids_1T, "use_cache": False}).logits
        assert torch.equal(logits, alone)
        alone.float().square().mean().backward()
        for name, leaf in leaves.items():
            expected[name] += leaf.grad
    for name, parameter in model.named_parameters():
        if name == "model.norm.weight":
            assert parameter.grad is None, "it is frozen"
        else:
            assert torch.equal(parameter.grad, expected[name]), name


def test_threads_that_add_at_once_lose_nothing_and_an_update_is_cast() -> None:
    weight = torch.nn.Parameter(torch.zeros(700, 500))
    casts = MasterCasts([weight], torch.bfloat16)

    def compute(_: int) -> None:
        with casts:
            total = (weight * 1.0).sum()
        total.backward()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compute, range(80)))
    assert torch.equal(weight.grad, torch.full((700, 500), 80.0))  # type: ignore[reportArgumentType]
    with torch.no_grad():
        weight += 1.0
    with casts:
        assert torch.equal(weight * 1.0, torch.ones(700, 500, dtype=torch.bfloat16))
