import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from trivet.algorithms.probe import Probe, ProbeSample
from trivet.config.layout import MANIFEST, RunLayout
from trivet.errors import InferenceError, WeightsError
from trivet.inference.engine_records import PolicyLedger
from trivet.inference.policy_loader import EnginePart, PolicyLoader
from trivet.storage.durable import FileRecord, digest_of, write_json_atomically
from trivet.weights.manifest import Manifest
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyVersion, TransferRound


class FakeEngine:
    """An engine that records its calls and loads every directory except those to be refused."""

    def __init__(
        self,
        *,
        serves_adapters: bool = False,
        refused: Sequence[str] = (),
        cannot_suspend: bool = False,
        scores: list[list[list[float]]] | None = None,
        num_wakes_refused: int = 0,
        transfer: str = "",
    ) -> None:
        """
        Args:
            transfer: `works` or `fails`; empty for an engine that takes part in none.
            scores: what each engine computes for the probe.
            num_wakes_refused: attempts to take GPU memory that fail before one succeeds.
        """
        self.serves_adapters = serves_adapters
        self.ledger = PolicyLedger()
        self.calls: list[str] = []
        self.refused = refused
        self.cannot_suspend = cannot_suspend
        self.dtype = "float32"
        self.pause_s = 0.25
        self.scores = scores or [[[-1.0, -2.0]]]
        self.num_wakes_refused = num_wakes_refused
        self.transfer = transfer
        self.transfer_backend = "gloo" if transfer else ""

    async def receive(self, transfer: TransferRound, records: dict[str, FileRecord]) -> None:
        self.calls.append(f"receive {transfer.version} {' '.join(records)}")
        if self.transfer == "fails":
            raise RuntimeError("a rank is missing")

    async def capture_experts(self) -> None:
        """Do nothing: no model of a test has experts."""

    async def pause(self) -> None:
        self.calls.append("pause")

    async def load(self, directory: Path, *, is_received: bool = False) -> None:
        self.calls.append(f"load {'what arrived' if is_received else directory.name}")
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

    async def undo_score(self) -> None:
        self.calls.append("undo_score")

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


PROBE = Probe(dtype="float32", samples=[ProbeSample([1, 2, 3], [-1.0, -2.0])])


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """A run with a start model and the policies 1, 2 and, with a probe, 3."""
    layout = RunLayout(tmp_path)
    for version in (1, 2, 3):
        content = f"weights {version}".encode()
        publish(
            layout,
            version=PolicyVersion(version),
            run_id="test",
            write=lambda directory, content=content: (directory / "model.safetensors").write_bytes(content) and None,
            probe=PROBE if version == 3 else None,
        )
    start = tmp_path / "start"
    start.mkdir()
    (start / "model.safetensors").write_bytes(b"start")
    return layout


def run(
    layout: RunLayout, engine: FakeEngine, scenario: Callable[[PolicyLoader], Awaitable[None]], **options: Any
) -> list[str]:
    """Return what was reported broken, in the list `broken` if it is given."""
    broken: list[str] = options.pop("broken", [])
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
            **options,
        )
        await loader.prepare()
        await scenario(loader)

    asyncio.run(main())
    return broken


def take_steps(layout: RunLayout, engine: FakeEngine, steps: str, **options: Any) -> list[int]:
    """Carry out steps such as `1` (load policy 1), `start` and `sleep`; return the version after each."""
    versions: list[int] = []

    async def scenario(loader: PolicyLoader) -> None:
        for step in steps.split():
            if step.isdigit():
                await loader.load(layout.weights_step(int(step)))
            else:
                await (loader.load_start() if step == "start" else loader.sleep())
            versions.append(loader.policy.version)
            assert loader.is_asleep is (step == "sleep")

    assert run(layout, engine, scenario, **options) == []
    return versions


_LOAD_1, _LOAD_2 = ["pause", "load step_1", "drop_caches", "resume"], ["pause", "load step_2", "drop_caches", "resume"]


@pytest.mark.parametrize(
    ("engine", "steps", "versions", "calls"),
    [
        pytest.param({}, "1", [1], _LOAD_1, id="a policy is loaded between a pause and a resume"),
        pytest.param(
            {}, "1 start", [1, 0], [*_LOAD_1, "pause", "load start", "drop_caches", "resume"], id="the start weights again"
        ),
        pytest.param(
            {"scores": [[[-1.0, -2.0]], [[-1.0, -2.0002]]]},
            "3",
            [3],
            ["pause", "load step_3", "drop_caches", "score [[1, 2, 3]]", "resume"],
            id="a probe is reproduced before the policy is served",
        ),
        pytest.param(
            {},
            "sleep sleep 1 2",  # an orchestrator that was started again may ask twice
            [0, 0, 1, 2],
            ["pause", "suspend", "wake weights", "load step_1", "drop_caches", "wake kv_cache", "resume", *_LOAD_2],
            id="a sleeping engine gets its weights before a load and its cache after it",
        ),
        pytest.param(
            {"num_wakes_refused": 3},
            "sleep 1",
            [0, 1],
            ["pause", "suspend", *["wake weights"] * 4, "load step_1", "drop_caches", "wake kv_cache", "resume"],
            id="memory that is freed a moment late is waited for",
        ),
    ],
)
def test_what_an_engine_does_for_a_policy(
    layout: RunLayout, engine: dict[str, Any], steps: str, versions: list[int], calls: list[str]
) -> None:
    fake = FakeEngine(**engine)
    assert take_steps(layout, fake, steps) == versions
    assert fake.calls == calls
    assert fake.ledger.version_at(float("inf")) == versions[-1]


@pytest.mark.parametrize(
    ("engine", "steps", "message", "calls"),
    [
        pytest.param(
            {"scores": [[[-1.0, -2.0]], [[-1.0, -9.0]]]},
            "1 3",
            r"policy 3 as this server computes it is not.*policy 1 is served again",
            ["score [[1, 2, 3]]", "undo_score", "load step_1", "drop_caches", "resume"],
            id="a probe that is not reproduced",
        ),
        pytest.param(
            {"refused": ["step_2"]},
            "1 2",
            r"step_2 .*\(RuntimeError: shapes differ\); policy 1 is served",
            ["pause", "load step_2", "undo_score", "load step_1", "drop_caches", "resume"],
            id="a failed load",
        ),
        pytest.param(
            {"refused": ["step_1"]},
            "sleep 1",
            "policy 0 is served again",
            ["wake weights", "load step_1", "undo_score", "load start", "drop_caches", "wake kv_cache", "resume"],
            id="a failed load of an engine that slept",
        ),
    ],
)
def test_what_cannot_be_served_leaves_the_policy_before(
    layout: RunLayout, engine: dict[str, Any], steps: str, message: str, calls: list[str]
) -> None:
    fake = FakeEngine(**engine)
    with pytest.raises((InferenceError, WeightsError), match=message):
        take_steps(layout, fake, steps)
    assert fake.calls[-len(calls) :] == calls


@pytest.mark.parametrize(
    ("engine", "steps", "message"),
    [
        ({"refused": ["step_1", "start"]}, "1", "the server ends"),
        ({"cannot_suspend": True}, "sleep", r"out of main memory.*the server ends"),
        (
            {"num_wakes_refused": 10_000},
            "sleep 1",
            r"weights got no GPU memory for 100 s .*lower inference.gpu_memory_utilization",
        ),
    ],
)
def test_an_engine_that_cannot_go_back_stays_paused_and_is_reported_broken(
    layout: RunLayout, engine: dict[str, Any], steps: str, message: str
) -> None:
    fake, broken = FakeEngine(**engine), list[str]()
    with pytest.raises(InferenceError, match=message):
        take_steps(layout, fake, steps, broken=broken)
    assert broken == ["broken"]
    assert "resume" not in fake.calls
    assert fake.calls.count("wake weights") in (0, 2 * 51)


def test_the_mismatch_is_that_of_the_engine_that_is_furthest_and_gone_with_a_policy_without_a_probe(layout: RunLayout) -> None:
    async def scenario(loader: PolicyLoader) -> None:
        await loader.load(layout.weights_step(3))
        assert loader.probe_result is not None
        assert loader.probe_result.mismatch == pytest.approx(1e-4)
        await loader.load(layout.weights_step(1))
        assert loader.probe_result is None

    run(layout, FakeEngine(scores=[[[-1.0, -2.0]], [[-1.0, -2.0002]]]), scenario)


def test_a_directory_that_is_not_whole_does_not_even_pause_the_engine(layout: RunLayout) -> None:
    (layout.weights_step(1) / "model.safetensors").write_bytes(b"weights X")
    engine = FakeEngine()
    with pytest.raises(WeightsError, match="altered"):
        take_steps(layout, engine, "1")
    assert engine.calls == []


def test_a_policy_whose_bytes_were_verified_is_not_read_again(layout: RunLayout) -> None:
    (layout.weights_step(1) / "model.safetensors").write_bytes(b"weights X")  # a read would find this
    engine = FakeEngine()

    async def scenario(loader: PolicyLoader) -> None:
        assert (await loader.load(layout.weights_step(1), is_verified=True)).version == 1

    run(layout, engine, scenario)
    assert engine.calls == _LOAD_1


def test_loads_at_the_same_time_happen_one_after_the_other(layout: RunLayout) -> None:
    engine = FakeEngine()

    async def scenario(loader: PolicyLoader) -> None:
        async with asyncio.TaskGroup() as tasks:
            for version in (1, 2):
                tasks.create_task(loader.load(layout.weights_step(version)), name=f"load {version}")

    run(layout, engine, scenario)
    assert engine.calls == [*_LOAD_1, *_LOAD_2]


_TAIL_3 = ["drop_caches", "score [[1, 2, 3]]", "resume"]


@pytest.mark.parametrize(
    ("transfer", "source", "calls"),
    [
        pytest.param(
            "works",
            "gloo",
            ["receive 3 model.safetensors", "pause", "load what arrived", *_TAIL_3],
            id="it arrives before the pause",
        ),
        pytest.param(
            "fails", "files", ["receive 3 model.safetensors", "pause", "load step_3", *_TAIL_3], id="a transfer that fails"
        ),
        pytest.param("", "files", ["pause", "load step_3", *_TAIL_3], id="the engine takes part in none"),
    ],
)
def test_what_an_engine_does_for_a_transfer(layout: RunLayout, transfer: str, source: str, calls: list[str]) -> None:
    fake = FakeEngine(transfer=transfer)

    async def scenario(loader: PolicyLoader) -> None:
        await loader.load(layout.weights_step(3), transfer_of(3))
        assert loader.policy.version == 3
        assert loader.source == source

    assert run(layout, fake, scenario) == []
    assert fake.calls == calls


def transfer_of(version: int) -> TransferRound:
    return TransferRound(
        version=PolicyVersion(version), digest="d", group_id="g", host="h", port=1, world_size=2, timeout_s=1.0
    )


def test_files_that_were_altered_are_not_loaded_in_place_of_a_failed_transfer(layout: RunLayout) -> None:
    (layout.weights_step(2) / "model.safetensors").write_bytes(b"weights X")
    fake = FakeEngine(transfer="fails")

    async def scenario(loader: PolicyLoader) -> None:
        with pytest.raises(WeightsError, match=r"altered|not what was published"):
            await loader.load(layout.weights_step(2), transfer_of(2))

    assert run(layout, fake, scenario) == []
    assert fake.calls == ["receive 2 model.safetensors"], "the engine did not even pause"


def test_an_engine_that_cannot_load_what_arrived_serves_the_policy_before_from_its_files(layout: RunLayout) -> None:
    fake = FakeEngine(transfer="works", refused=["step_2"])

    async def scenario(loader: PolicyLoader) -> None:
        await loader.load(layout.weights_step(1), transfer_of(1))
        assert loader.source == "gloo"
        with pytest.raises(InferenceError, match="policy 1 is served again"):
            await loader.load(layout.weights_step(2), transfer_of(2))
        assert (loader.policy.version, loader.source) == (1, "files")

    assert run(layout, fake, scenario) == []
    assert fake.calls[-4:] == ["undo_score", "load step_1", "drop_caches", "resume"]


def publish_adapter(layout: RunLayout, version: int, *, base: str) -> None:
    def write(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_bytes(f"adapter {version}".encode())
        (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))

    publish(layout, version=PolicyVersion(version), run_id="test", write=write)


@pytest.mark.parametrize(
    ("refused", "steps", "loads"),
    [
        pytest.param([], "4 5 start", ["adapter step_4", "adapter step_5", "adapter None"], id="on the start model, it alone"),
        pytest.param(
            [],
            "1 4",
            ["load step_1", "adapter None", "load start", "adapter step_4"],
            id="after whole weights, on the start model again",
        ),
        pytest.param(
            ["step_1"],
            "4 1",
            ["adapter step_4", "load step_1", "load start", "adapter step_4"],
            id="a failed load of whole weights is undone below it",
        ),
    ],
)
def test_what_is_loaded_for_an_adapter(layout: RunLayout, refused: list[str], steps: str, loads: list[str]) -> None:
    engine = FakeEngine(serves_adapters=True, refused=refused)
    for version in (4, 5):
        publish_adapter(layout, version, base=str(layout.root / "start"))
    with pytest.raises(InferenceError, match="policy 4 is served again") if refused else nullcontext():
        take_steps(layout, engine, steps)
    assert [call for call in engine.calls if call.startswith(("load", "adapter"))] == ["adapter None", *loads]


@pytest.mark.parametrize(
    ("serves_adapters", "base", "message"),
    [
        (False, "start", r"started without inference\.enable_lora = true"),
        (True, "org/other", r"an adapter for org/other, and this server serves .*start: start one with"),
    ],
)
def test_an_adapter_that_cannot_be_served_does_not_even_pause_the_engine(
    layout: RunLayout, serves_adapters: bool, base: str, message: str
) -> None:
    publish_adapter(layout, 4, base=str(layout.root / base) if base == "start" else base)
    engine = FakeEngine(serves_adapters=serves_adapters)
    with pytest.raises(WeightsError, match=message):
        take_steps(layout, engine, "4")
    assert engine.calls == (["adapter None"] if serves_adapters else [])


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


def test_a_change_that_the_engine_never_ends_is_reported_broken(layout: RunLayout) -> None:
    async def scenario(loader: PolicyLoader) -> None:
        with pytest.raises(InferenceError, match="did not answer within 0 s: the server ends"):
            await loader.while_awake(asyncio.Event().wait)

    assert run(layout, FakeEngine(), scenario, timeout_s=0.01) == ["broken"]
