import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from trivet.algorithms.probe import Probe, ProbeSample
from trivet.config.layout import MANIFEST, RunLayout
from trivet.errors import InferenceError, WeightsError
from trivet.inference.engine_records import PolicyLedger
from trivet.inference.policy_loader import EnginePart, PolicyLoader
from trivet.storage.durable import FileRecord, digest_of, write_json_atomically
from trivet.weights.manifest import Manifest
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyVersion


class FakeEngine:
    """An engine that records its calls and loads every directory except those to be refused."""

    def __init__(self, *, serves_adapters: bool = False) -> None:
        self.serves_adapters = serves_adapters
        self.ledger = PolicyLedger()
        self.calls: list[str] = []
        self.refused: set[str] = set()
        self.cannot_suspend = False
        self.dtype = "float32"
        self.scores = [[[-1.0, -2.0]]]
        """What each engine computes for the probe."""
        self.num_wakes_refused = 0
        """Attempts to take GPU memory that fail before one succeeds."""

    async def pause(self) -> None:
        self.calls.append("pause")

    async def load(self, directory: Path) -> None:
        self.calls.append(f"load {directory.name}")
        await asyncio.sleep(0)
        if directory.name in self.refused:
            raise RuntimeError("shapes differ")

    async def load_adapter(self, directory: Path | None) -> None:
        self.calls.append(f"adapter {directory.name if directory else None}")
        if directory is not None and directory.name in self.refused:
            raise RuntimeError("shapes differ")

    async def drop_caches(self) -> None:
        self.calls.append("drop_caches")

    async def score(self, samples: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        self.calls.append(f"score {samples}")
        return self.scores

    async def discard(self) -> None:
        self.calls.append("discard")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def suspend(self) -> None:
        self.calls.append("suspend")
        if self.cannot_suspend:
            raise RuntimeError("out of main memory")

    async def wake(self, part: EnginePart) -> None:
        self.calls.append(f"wake {part}")
        if self.num_wakes_refused:
            self.num_wakes_refused -= 1
            raise RuntimeError("CUDA Error: out of memory")


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
    """Return what was reported broken."""
    broken: list[str] = []
    now_s = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    async def main() -> None:
        start = layout.root / "start"
        loader = PolicyLoader(
            engine,  # type: ignore[arg-type]  stands in for VersionedEngine
            model_name=str(start),
            start_directory=start,
            roots=[layout.weights],
            on_broken=lambda: broken.append("broken"),
            clock=lambda: now_s,
            sleep=sleep,
        )
        await loader.prepare()
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
    assert engine.calls == ["pause", "load step_1", "drop_caches", "resume"]


PROBE = Probe(dtype="float32", samples=[ProbeSample([1, 2, 3], [-1.0, -2.0])])


def publish_with_probe(layout: RunLayout, *, version: int) -> Path:
    publish(
        layout,
        version=PolicyVersion(version),
        run_id="test",
        write=lambda directory: (directory / "model.safetensors").write_bytes(b"proven") and None,
        probe=PROBE,
    )
    return layout.weights_step(version)


def test_a_policy_is_served_once_the_engine_reproduces_its_probe(layout: RunLayout) -> None:
    engine = FakeEngine()
    directory = publish_with_probe(layout, version=3)

    async def scenario(loader: PolicyLoader) -> None:
        engine.scores = [[[-1.0, -2.0]], [[-1.0, -2.0002]]]
        await loader.load(directory)
        assert loader.probe_result is not None
        assert loader.probe_result.mismatch == pytest.approx(1e-4)
        await loader.load(layout.weights_step(1))
        assert loader.probe_result is None

    assert run(layout, engine, scenario) == []
    assert engine.calls[:5] == ["pause", "load step_3", "drop_caches", "score [[1, 2, 3]]", "resume"]


def test_a_policy_that_the_engine_does_not_reproduce_is_refused_and_the_one_before_served_again(layout: RunLayout) -> None:
    engine = FakeEngine()
    directory = publish_with_probe(layout, version=3)

    async def scenario(loader: PolicyLoader) -> None:
        await loader.load(layout.weights_step(1))
        engine.scores = [[[-1.0, -2.0]], [[-1.0, -9.0]]]
        with pytest.raises(WeightsError, match=r"policy 3 as this server computes it is not.*policy 1 is served again"):
            await loader.load(directory)
        assert loader.policy.version == engine.ledger.current == 1

    assert run(layout, engine, scenario) == []
    assert engine.calls[-5:] == ["score [[1, 2, 3]]", "discard", "load step_1", "drop_caches", "resume"]


def test_the_start_weights_are_version_0_again(layout: RunLayout) -> None:
    engine = FakeEngine()

    async def scenario(loader: PolicyLoader) -> None:
        start = loader.policy
        await loader.load(layout.weights_step(1))
        assert await loader.load_start() == start == loader.policy
        assert engine.ledger.current == 0

    run(layout, engine, scenario)
    assert engine.calls[4:] == ["pause", "load start", "drop_caches", "resume"]


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
    assert engine.calls[4:] == ["pause", "load step_2", "discard", "load step_1", "drop_caches", "resume"]


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
    assert engine.calls == ["pause", "load step_1", "drop_caches", "resume", "pause", "load step_2", "drop_caches", "resume"]


def publish_adapter(layout: RunLayout, version: int, *, base: str) -> None:
    def write(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_bytes(f"adapter {version}".encode())
        (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))

    publish(layout, version=PolicyVersion(version), run_id="test", write=write)


def test_beside_the_start_model_only_the_adapter_is_loaded(layout: RunLayout) -> None:
    engine = FakeEngine(serves_adapters=True)
    for version in (3, 4):
        publish_adapter(layout, version, base=str(layout.root / "start"))

    async def scenario(loader: PolicyLoader) -> None:
        assert engine.calls == ["adapter None"]
        for version in (3, 4):
            assert (await loader.load(layout.weights_step(version))).version == version
        await loader.load_start()

    run(layout, engine, scenario)
    loads = [call for call in engine.calls if call.startswith(("load", "adapter"))]
    assert loads == ["adapter None", "adapter step_3", "adapter step_4", "adapter None"]


def test_an_adapter_after_whole_weights_brings_the_start_model_back(layout: RunLayout) -> None:
    engine = FakeEngine(serves_adapters=True)
    publish_adapter(layout, 3, base=str(layout.root / "start"))

    async def scenario(loader: PolicyLoader) -> None:
        for version in (1, 3):
            await loader.load(layout.weights_step(version))

    run(layout, engine, scenario)
    loads = [call for call in engine.calls if call.startswith(("load", "adapter"))]
    assert loads == ["adapter None", "load step_1", "adapter None", "load start", "adapter step_3"]


def test_a_failed_load_of_whole_weights_is_undone_with_the_start_model_below_the_adapter(layout: RunLayout) -> None:
    engine = FakeEngine(serves_adapters=True)
    engine.refused = {"step_1"}
    publish_adapter(layout, 3, base=str(layout.root / "start"))

    async def scenario(loader: PolicyLoader) -> None:
        await loader.load(layout.weights_step(3))
        with pytest.raises(InferenceError, match="policy 3 is served again"):
            await loader.load(layout.weights_step(1))

    run(layout, engine, scenario)
    loads = [call for call in engine.calls if call.startswith(("load", "adapter"))]
    assert loads == ["adapter None", "adapter step_3", "load step_1", "load start", "adapter step_3"]


def test_an_adapter_that_cannot_be_served_does_not_even_pause_the_engine(layout: RunLayout) -> None:
    publish_adapter(layout, 3, base=str(layout.root / "start"))
    publish_adapter(layout, 4, base="org/other")
    without, engine = FakeEngine(), FakeEngine(serves_adapters=True)

    async def refuses_adapters(loader: PolicyLoader) -> None:
        with pytest.raises(WeightsError, match=r"started without inference\.enable_lora = true"):
            await loader.load(layout.weights_step(3))

    async def refuses_others(loader: PolicyLoader) -> None:
        with pytest.raises(WeightsError, match=r"an adapter for org/other, and this server serves .*start: start one with"):
            await loader.load(layout.weights_step(4))

    run(layout, without, refuses_adapters)
    run(layout, engine, refuses_others)
    assert (without.calls, engine.calls) == ([], ["adapter None"])


def test_weights_from_elsewhere_are_not_read(layout: RunLayout, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither a link nor a path that climbs out of the run's weights helps."""
    foreign = RunLayout(tmp_path_factory.mktemp("foreign"))
    publish(foreign, version=PolicyVersion(1), run_id="", write=lambda path: (path / "a").write_bytes(b"a") and None)
    (layout.weights / "step_9").symlink_to(foreign.weights_step(1))
    climbing = layout.weights / ".." / ".." / foreign.root.name / "weights" / "step_1"

    async def scenario(loader: PolicyLoader) -> None:
        for directory in (foreign.weights_step(1), layout.weights / "step_9", climbing):
            with pytest.raises(WeightsError, match=r"is not below .*inference\.server\.weight_dirs"):
                await loader.load(directory)

    engine = FakeEngine()
    run(layout, engine, scenario)
    assert engine.calls == []


def test_a_sparse_file_does_not_keep_the_other_loads_waiting(layout: RunLayout) -> None:
    """The file has 8 TiB, which take no space on disk, and a manifest that says so."""
    directory = layout.weights_step(1)
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(8 << 40)
    files = {"model.safetensors": FileRecord(num_bytes=8 << 40, xxh3_128="0" * 32)}
    write_json_atomically(directory / MANIFEST, Manifest(version=PolicyVersion(1), files=files, digest=digest_of(files)))

    async def scenario(loader: PolicyLoader) -> None:
        with pytest.raises(WeightsError, match="has 8796093022208 bytes, where at most"):
            await loader.load(directory)
        assert (await loader.load(layout.weights_step(2))).version == 2

    run(layout, FakeEngine(), scenario)


def test_a_sleeping_engine_gets_its_weights_before_a_load_and_its_cache_after_it(layout: RunLayout) -> None:
    engine = FakeEngine()

    async def scenario(loader: PolicyLoader) -> None:
        await loader.sleep()
        await loader.sleep()  # an orchestrator that was started again may ask twice
        assert loader.is_asleep
        await loader.load(layout.weights_step(1))
        assert not loader.is_asleep
        await loader.load(layout.weights_step(2))

    assert run(layout, engine, scenario) == []
    asleep = ["pause", "suspend", "wake weights", "load step_1", "drop_caches", "wake kv_cache", "resume"]
    assert engine.calls == [*asleep, "pause", "load step_2", "drop_caches", "resume"]


def test_a_sleeping_engine_that_cannot_load_a_policy_wakes_with_the_one_before(layout: RunLayout) -> None:
    engine = FakeEngine()
    engine.refused = {"step_1"}

    async def scenario(loader: PolicyLoader) -> None:
        await loader.sleep()
        with pytest.raises(InferenceError, match="policy 0 is served again"):
            await loader.load(layout.weights_step(1))
        assert not loader.is_asleep

    assert run(layout, engine, scenario) == []
    expected = [
        "pause",
        "suspend",
        "wake weights",
        "load step_1",
        "discard",
        "load start",
        "drop_caches",
        "wake kv_cache",
        "resume",
    ]
    assert engine.calls == expected


def test_an_engine_that_cannot_sleep_is_reported_broken(layout: RunLayout) -> None:
    engine = FakeEngine()
    engine.cannot_suspend = True

    async def scenario(loader: PolicyLoader) -> None:
        with pytest.raises(InferenceError, match=r"out of main memory.*the server ends"):
            await loader.sleep()

    assert run(layout, engine, scenario) == ["broken"]


def test_a_sleeping_engine_waits_for_gpu_memory_that_is_freed_a_moment_late(layout: RunLayout) -> None:
    engine = FakeEngine()

    async def scenario(loader: PolicyLoader) -> None:
        await loader.sleep()
        engine.num_wakes_refused = 3
        assert (await loader.load(layout.weights_step(1))).version == 1

    assert run(layout, engine, scenario) == []
    woken = ["wake weights"] * 4 + ["load step_1", "drop_caches", "wake kv_cache", "resume"]
    assert engine.calls == ["pause", "suspend", *woken]


def test_gpu_memory_that_stays_taken_ends_the_server_with_what_to_lower(layout: RunLayout) -> None:
    engine = FakeEngine()

    async def scenario(loader: PolicyLoader) -> None:
        await loader.sleep()
        engine.num_wakes_refused = 10_000
        with pytest.raises(
            InferenceError, match=r"weights got no GPU memory for 100 s .*lower inference.gpu_memory_utilization"
        ):
            await loader.load(layout.weights_step(1))

    assert run(layout, engine, scenario) == ["broken"]
    assert engine.calls.count("wake weights") == 2 * 51


def test_an_engine_changes_in_another_way_only_while_it_is_awake_and_does_not_sleep_meanwhile(layout: RunLayout) -> None:
    engine = FakeEngine()

    async def scenario(loader: PolicyLoader) -> None:
        sleeping: list[asyncio.Task[None]] = []

        async def change() -> None:
            sleeping.append(asyncio.create_task(loader.sleep()))
            await asyncio.sleep(0)
            assert not loader.is_asleep

        await loader.while_awake(change)
        await sleeping[0]
        with pytest.raises(WeightsError, match="asleep while the trainer learns"):
            await loader.while_awake(change)

    run(layout, engine, scenario)
    assert engine.calls == ["pause", "suspend"]


def test_a_change_that_the_engine_never_ends_is_reported_broken(tmp_path: Path) -> None:
    broken: list[str] = []

    async def main() -> None:
        loader = PolicyLoader(
            FakeEngine(),  # type: ignore[arg-type]  stands in for VersionedEngine
            model_name="m",
            start_directory=tmp_path,
            roots=[tmp_path],
            on_broken=lambda: broken.append("broken"),
            timeout_s=0.01,
        )
        with pytest.raises(InferenceError, match="did not answer within 0 s: the server ends"):
            await loader.while_awake(asyncio.Event().wait)

    asyncio.run(main())
    assert broken == ["broken"]
