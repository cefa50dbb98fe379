"""Every loss with every lever of the trainer, on one, two and four real ranks: the arithmetic is the same (invariant 8)."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
ORACLE = ROOT / "tests" / "unit" / "trainer" / "oracle.py"
PROGRAM = Path(__file__).with_name("trainer_lever_program.py")
TIMEOUT_S = 400
TOLERANCE = 1e-6
"""Relative, float32 (design invariant 8)."""


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(num_ranks: int, model: Path, output: Path, *, num_replicas: int) -> dict[str, Any]:
    common = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = (
        os.environ | common | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    )
    logs = [output / f"rank_{rank}_of_{num_ranks}.log" for rank in range(num_ranks)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                command = [sys.executable, str(PROGRAM), str(model), str(ORACLE), str(output), str(num_replicas)]
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=environment | own, stdout=file, stderr=subprocess.STDOUT))
        for rank in ranks:
            assert rank.wait(TIMEOUT_S) == 0, "\n".join(log.read_text()[-3000:] for log in logs)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return torch.load(output / f"levers_{num_ranks}.pt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    maker = load_module(ROOT / "scripts" / "make_tiny_model.py")
    directory = tmp_path_factory.mktemp("model")
    maker.make_model(maker.make_tokenizer(), hidden_size=64, layers=3, seed=1, tied=True).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(1, model, tmp_path_factory.mktemp("one"), num_replicas=1)


@pytest.fixture(scope="module")
def of_two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(2, model, tmp_path_factory.mktemp("two"), num_replicas=1)


@pytest.fixture(scope="module")
def of_four(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two copies of the model, each sharded over two ranks."""
    return run_ranks(4, model, tmp_path_factory.mktemp("four"), num_replicas=2)


def differences(found: dict[tuple[str, str], Any], alone: dict[tuple[str, str], Any]) -> list[str]:
    """What of `found` is not what one rank computes without a lever from one row."""
    oracle = load_module(ORACLE)
    wrong = []
    for (lever, loss), result in found.items():
        expected = alone["lora" if lever.startswith("lora") else "plain", loss]
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
    """One rank holds it once, each of two (with or without a copy beside them) half of it and one tensor."""
    whole = alone["start"]["whole"]
    assert whole < alone["start"]["peak"] < 1.35 * whole
    assert 0.5 * whole < of_two["start"]["peak"] < 0.85 * whole
    assert 0.5 * whole < of_four["start"]["peak"] < 0.85 * whole
