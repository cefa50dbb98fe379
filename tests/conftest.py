"""Fixtures that any test may ask for. Nothing here imports torch or vLLM before a test needs them."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.servers import ServerProcess, reload_weights, run_server
from support.tiny_models import tiny_model_writer

pytest_plugins = ["support.record"]

# Importing everything that the tests name leaves a million objects that live to the end. Looking through them for garbage again and
# again is a third of the time of collecting: `pytest_collection_finish` goes on without them.
gc.disable()

# How long an example takes says how busy the machine is.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
# A thread of OpenMP that waits must sleep, as in every role on the CPU: spinning, it takes the core from another test's processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.update({"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "TOKENIZERS_PARALLELISM": "false"})


_SLOW = ("integration", "unit/environments/nodes", "unit/schedulers")
"""Directories whose tests are slow unless they are marked core: integration tests, and those of runs over many machines."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files of slow tests alone where none is asked for: importing them takes seconds in every worker."""
    is_slow = collection_path.suffix == ".py" and _is_slow(collection_path) and "mark.core" not in collection_path.read_text()
    return True if is_slow and str(config.option.markexpr).startswith("not slow") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("core") is None and _is_slow(item.path):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _is_slow(path: Path) -> bool:
    return any(path.is_relative_to(Path(__file__).parent / name) for name in _SLOW)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write tests/unit/messages.txt anew")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose LM head is its embedding."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model_writer()(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an LM head of its own."""
    directory = tmp_path_factory.mktemp("models") / "tiny-untied"
    tiny_model_writer(tied=False)(directory)
    return directory


@pytest.fixture(scope="session")
def shared_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The one real server of the session. It serves `tiny_model` in float32, and adapters of it."""
    flags = {"enable_lora": "true", "max_loras": "2", "max_cpu_loras": "2", "max_lora_rank": "8"}
    with run_server(tiny_model, log=tmp_path_factory.mktemp("server") / "inference.stdout", **flags) as server:
        yield server


@pytest.fixture
def inference_server(shared_server: ServerProcess) -> str:
    """Base URL of the session's server, which serves its start weights."""
    reload_weights(shared_server.base_url)
    return shared_server.base_url
