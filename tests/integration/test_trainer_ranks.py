"""Run real gloo ranks in separate processes. The arithmetic does not depend on their number."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import run_ranks
from support.scripts import load_module
from trivet.examples.tiny_model import make_model, make_tokenizer
from trivet.trainer.ranks.world import open_world

ORACLE = Path(__file__).parents[1] / "unit" / "trainer" / "oracle.py"
PROGRAM = Path(__file__).with_name("trainer_rank_program.py")
TOLERANCE = 1e-6
"""Relative tolerance in float32 (invariant 8)."""
OPTIMIZER_TOLERANCES = {"sgd": 1e-6, "muon": 1e-3}
"""Tolerance for the weights after six steps, by optimizer besides AdamW. Muon iterates in bfloat16."""
OTHERS = tuple(OPTIMIZER_TOLERANCES)


def run_alone(model: Path, tasks: list[str]) -> None:
    """Compute the same tasks with one rank, in this process."""
    torch.set_num_threads(1)
    with open_world(device="cpu", timeout_s=60) as world:
        load_module(PROGRAM).run_tasks(str(model), load_module(ORACLE), tasks, world)


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
    run_ranks(2, PROGRAM, [str(model), str(ORACLE), *of_two, *of_adapters, *of_others], logs=two)
    run_alone(model, [f"resume:{two}", f"lora-resume:{two}"])
    return Outputs(one, two)


@pytest.fixture(scope="module")
def continued_by_four(model: Path, outputs: Outputs) -> Path:
    """Return the outputs of four ranks that continued what two ranks saved."""
    saved = outputs.saved_by_two
    run_ranks(4, PROGRAM, [str(model), str(ORACLE), *(f"{name}-resume:{saved}" for name in OTHERS)], logs=saved)
    return saved


def check_gradients(results: dict[tuple[str, str], Any], model: Path) -> None:
    oracle, program = load_module(ORACLE), load_module(PROGRAM)
    examples = oracle.make_examples(count=9, vocab_size=100, prompt_length=program.PROMPT_LENGTH)
    layouts = {*oracle.layouts(examples), "packed anew"}
    assert {layout for _, layout in results} == layouts
    for loss, config in program.LOSSES.items():
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
    run_ranks(3, PROGRAM, [str(model), str(ORACLE), f"gradients:{tmp_path}"], logs=tmp_path)
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


def test_a_rank_that_fails_says_why_at_once_on_a_backend_whose_shutdown_waits_for_the_others(tmp_path: Path) -> None:
    program = Path(__file__).with_name("rank_failure_program.py")
    run_ranks(2, program, [], logs=tmp_path, codes=[1, 1], timeout_s=60)
    assert "this rank has failed" in (tmp_path / "rank_1_of_2.log").read_text()
