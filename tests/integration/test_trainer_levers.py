"""Compute every loss with every lever of the trainer, on one, two and four real ranks. The arithmetic is the same (invariant
8)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import TIMEOUT_S, run_ranks
from support.scripts import load_module
from trivet.examples.tiny_model import make_model, make_tokenizer

ORACLE = Path(__file__).parents[1] / "unit" / "trainer" / "oracle.py"
PROGRAM = Path(__file__).with_name("trainer_lever_program.py")
TOLERANCE = 1e-6
"""Relative tolerance in float32 (invariant 8)."""


def measure(num_ranks: int, model: Path, output: Path, *, num_replicas: int, levers: Sequence[str] = ()) -> dict[str, Any]:
    """Return the results of the program's ranks."""
    words = [str(model), str(ORACLE), str(output), str(num_replicas), *levers]
    run_ranks(num_ranks, PROGRAM, words, logs=output, timeout_s=1800 if levers else TIMEOUT_S)
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
    norms = [alone["gradients"]["plain", loss]["norm"] for loss in load_module(PROGRAM).LOSSES]
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
    assert len(found) == 2 * len(load_module(PROGRAM).LOSSES)
    assert differences(found, alone["gradients"]) == []


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_run_that_resumes_with_a_lever_ends_with_the_weights_of_one_that_did_not(
    num_ranks: int, alone: dict[str, Any], of_two: dict[str, Any], of_four: dict[str, Any]
) -> None:
    runs = {1: alone, 2: of_two, 4: of_four}[num_ranks]["resumed"]
    assert runs.keys() == load_module(PROGRAM).RESUMED.keys()
    for lever, run in runs.items():
        for name, weight in run["resumed"].items():
            assert torch.equal(weight, run["unbroken"][name]), (lever, name)


def test_no_rank_ever_holds_the_whole_model(alone: dict[str, Any], of_two: dict[str, Any], of_four: dict[str, Any]) -> None:
    """One rank holds it once. Each of two ranks, with or without a copy, holds half of it and one tensor."""
    whole = alone["start"]["whole"]
    assert whole < alone["start"]["peak"] < 1.35 * whole
    assert 0.5 * whole < of_two["start"]["peak"] < 0.85 * whole
    assert 0.5 * whole < of_four["start"]["peak"] < 0.85 * whole
