"""A packed step of each family has the loss and gradient of transformers alone, one conversation at a time."""

from pathlib import Path

import pytest
import torch

from support.families import FAMILIES, Family
from trivet.trainer.ranks.world import gather_tensor
from trivet.trainer.step import train_step

TOLERANCE = 1e-5
"""Relative tolerance in float32."""
OFTEN = ("Llama 3", "Qwen3", "Qwen3.5", "Gemma 2", "GPT-OSS")
"""Families of the default suite: one for each of rope scaling, norms, no packing, windows with caps, and sinks with experts."""
every_family = pytest.mark.parametrize(
    "family",
    [pytest.param(family, id=family.key, marks=[] if family.name in OFTEN else [pytest.mark.slow]) for family in FAMILIES],
)
PROMPT = 20
"""Tokens that some of the samples begin with in common: longer than a window, and enough to be computed once."""


@every_family
def test_a_step_in_bfloat16_differs_by_rounding_alone(family: Family, make_learner, oracle, tmp_path: Path) -> None:
    directory = family.save(tmp_path)
    examples = oracle.make_examples(count=3, vocab_size=96, prompt_length=PROMPT)
    losses = []
    for dtype in ("float32", "bfloat16"):
        learner = make_learner(directory, compute_dtype=dtype)
        learner.model.eval()
        losses.append(train_step(learner, [oracle.make_row(examples)], step=1).loss)
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@every_family
def test_loss_and_gradient_of_a_packed_step_are_those_of_transformers_alone(
    family: Family, is_tied: bool, make_learner, oracle, tmp_path: Path
) -> None:
    directory = family.save(tmp_path, tie_word_embeddings=is_tied)
    examples = oracle.make_examples(count=6, vocab_size=96, prompt_length=PROMPT)
    expected_loss, expected = oracle.loss_and_gradients(directory, examples, None, attention=family.attention)
    learner = make_learner(directory)
    assert learner.model.packs == family.packs
    learner.model.eval()  # no dropout, no noise in a router
    rows = [oracle.make_row(examples[:4]), oracle.make_row(examples[4:])]
    result = train_step(learner, rows, step=1)
    named = [(name.removeprefix("causal_lm."), parameter) for name, parameter in learner.model.named_parameters()]
    gradients = {
        name: torch.zeros_like(expected[name]) if parameter.grad is None else gather_tensor(parameter.grad)
        for name, parameter in named
        if expected[name] is not None
    }
    assert result.loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert oracle.gradient_error(gradients, {name: expected[name] for name in gradients}) < TOLERANCE
