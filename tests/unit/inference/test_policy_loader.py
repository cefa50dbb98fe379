import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from trivet.config.layout import RunLayout
from trivet.errors import InferenceError, WeightsError
from trivet.inference.policy_ledger import PolicyLedger
from trivet.inference.policy_loader import PolicyLoader
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyVersion


class FakeEngine:
    """Remembers what it was asked; loads what it is told unless the directory is to be refused."""

    def __init__(self) -> None:
        self.ledger = PolicyLedger()
        self.calls: list[str] = []
        self.refused: set[str] = set()

    async def pause(self) -> None:
        self.calls.append("pause")

    async def load(self, directory: Path) -> None:
        self.calls.append(f"load {directory.name}")
        await asyncio.sleep(0)
        if directory.name in self.refused:
            raise RuntimeError("shapes differ")

    async def forget(self) -> None:
        self.calls.append("forget")

    async def resume(self) -> None:
        self.calls.append("resume")


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    for version in (1, 2):
        content = f"weights {version}".encode()
        publish(
            layout,
            version=PolicyVersion(version),
            run_id="test",
            write=lambda directory, content=content: (directory / "model.safetensors").write_bytes(content) and None,
        )
    start = tmp_path / "start"
    start.mkdir()
    (start / "model.safetensors").write_bytes(b"start")
    return layout


def run(layout: RunLayout, engine: FakeEngine, scenario: Callable[[PolicyLoader], Awaitable[None]]) -> list[str]:
    """What was reported broken."""
    broken: list[str] = []

    async def main() -> None:
        loader = PolicyLoader(engine, start_directory=layout.root / "start", on_broken=lambda: broken.append("broken"))
        await loader.describe_start()
        await scenario(loader)

    asyncio.run(main())
    return broken


def test_a_policy_is_loaded_between_a_pause_and_a_resume(layout: RunLayout) -> None:
    engine = FakeEngine()

    async def scenario(loader: PolicyLoader) -> None:
        manifest = await loader.load(layout.weights_step(1))
        assert loader.policy == manifest
        assert manifest.version == engine.ledger.current == 1

    assert run(layout, engine, scenario) == []
    assert engine.calls == ["pause", "load step_1", "forget", "resume"]


def test_the_start_weights_are_version_0_again(layout: RunLayout) -> None:
    engine = FakeEngine()

    async def scenario(loader: PolicyLoader) -> None:
        start = loader.policy
        await loader.load(layout.weights_step(1))
        assert await loader.load_start() == start == loader.policy
        assert engine.ledger.current == 0

    run(layout, engine, scenario)
    assert engine.calls[4:] == ["pause", "load start", "forget", "resume"]


def test_a_directory_that_is_not_whole_does_not_even_pause_the_engine(layout: RunLayout) -> None:
    engine = FakeEngine()
    (layout.weights_step(1) / "model.safetensors").write_bytes(b"weights X")

    async def scenario(loader: PolicyLoader) -> None:
        with pytest.raises(WeightsError, match="altered"):
            await loader.load(layout.weights_step(1))
        assert loader.policy.version == 0

    run(layout, engine, scenario)
    assert engine.calls == []


def test_a_failed_load_brings_the_policy_before_back_and_resumes(layout: RunLayout) -> None:
    engine = FakeEngine()
    engine.refused = {"step_2"}

    async def scenario(loader: PolicyLoader) -> None:
        await loader.load(layout.weights_step(1))
        with pytest.raises(InferenceError, match=r"step_2 .*\(RuntimeError: shapes differ\); policy 1 is served"):
            await loader.load(layout.weights_step(2))
        assert loader.policy.version == engine.ledger.current == 1

    assert run(layout, engine, scenario) == []
    assert engine.calls[4:] == ["pause", "load step_2", "load step_1", "forget", "resume"]


def test_an_engine_that_cannot_go_back_stays_paused_and_is_reported_broken(layout: RunLayout) -> None:
    engine = FakeEngine()
    engine.refused = {"step_1", "start"}

    async def scenario(loader: PolicyLoader) -> None:
        with pytest.raises(InferenceError, match="the server ends"):
            await loader.load(layout.weights_step(1))

    assert run(layout, engine, scenario) == ["broken"]
    assert "resume" not in engine.calls


def test_loads_at_the_same_time_happen_one_after_the_other(layout: RunLayout) -> None:
    engine = FakeEngine()

    async def scenario(loader: PolicyLoader) -> None:
        async with asyncio.TaskGroup() as tasks:
            for version in (1, 2):
                tasks.create_task(loader.load(layout.weights_step(version)), name=f"load {version}")

    run(layout, engine, scenario)
    assert engine.calls == ["pause", "load step_1", "forget", "resume", "pause", "load step_2", "forget", "resume"]
