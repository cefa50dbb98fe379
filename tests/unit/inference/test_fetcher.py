import asyncio
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from support.policy_servers import publish_files
from trivet.config.layout import RunLayout
from trivet.errors import FetchFailed, WeightsError
from trivet.inference import fetcher as module
from trivet.inference.fetcher import PolicyFetcher
from trivet.storage.durable import list_files
from trivet.weights.fetch import PolicyCache
from trivet.weights.manifest import Manifest, offer_policy, verify
from trivet.weights.sources import DirectorySource, Problem, SourceProblem
from trivet.wire.versions import FetchablePolicy


class GatedSource:
    """Gives the bytes of a directory once its gate is open."""

    def __init__(self, weights: Path) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.is_broken = False
        self.num_reads = 0
        self._directory = DirectorySource(weights)

    def read(self, policy: FetchablePolicy, name: str, *, start: int) -> Generator[bytes]:
        self.num_reads += 1
        self.gate.wait(20)
        if self.is_broken:
            raise SourceProblem(Problem.WRONG, "made up")
        yield from self._directory.read(policy, name, start=start)


class FakeLoader:
    def __init__(self) -> None:
        self.max_bytes = 1 << 20
        self.loaded: list[Path] = []
        self.error: WeightsError | None = None

    async def load(self, directory: Path) -> Manifest:
        if self.error is not None:
            raise self.error
        self.loaded.append(directory)
        return verify(directory)


class Place:
    def __init__(self, root: Path) -> None:
        self.layout = RunLayout(root / "run")
        for version in (1, 2, 3):
            publish_files(self.layout, version, model=bytes([version]) * 10)
        self.source, self.loader = GatedSource(self.layout.weights), FakeLoader()
        self.cache = PolicyCache(root / "cache", run="run", make_source=lambda _: self.source)
        self.fetcher = PolicyFetcher(self.loader, self.cache)

    def policy(self, version: int) -> FetchablePolicy:
        return offer_policy(self.layout.weights_step(version), sources=["origin"])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.cache.close()


def test_a_policy_is_loaded_once_all_of_it_is_here_and_requests_are_answered_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ANSWER_INTERVAL_S", 0.01)

    async def scenario() -> None:
        place.source.gate.clear()
        for _ in range(3):
            await place.fetcher.load(place.policy(1))
            assert place.fetcher.is_fetching
            assert place.loader.loaded == []
        place.source.gate.set()
        while place.fetcher.is_fetching:
            await place.fetcher.load(place.policy(1))

    asyncio.run(scenario())
    assert place.loader.loaded == [place.cache.directory / "step_1"]
    assert place.source.num_reads == len(list_files(place.layout.weights_step(1))) - 1, "one fetch, and no request for STABLE"


def test_a_later_policy_ends_the_fetch_of_an_earlier_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_INTERVAL_S", 0.01)

    async def scenario() -> None:
        place.source.gate.clear()
        await place.fetcher.load(place.policy(1))
        await place.fetcher.load(place.policy(2))
        place.source.gate.set()
        while place.fetcher.is_fetching:
            await place.fetcher.load(place.policy(2))

    asyncio.run(scenario())
    assert [directory.name for directory in place.loader.loaded] == ["step_2"]
    assert not (place.cache.directory / "step_1").exists()


def test_after_a_failed_fetch_or_load_the_next_request_tries_again(place: Place) -> None:
    async def scenario() -> None:
        place.source.is_broken = True
        with pytest.raises(FetchFailed, match="made up"):
            await place.fetcher.load(place.policy(1))
        assert not place.fetcher.is_fetching
        place.source.is_broken, place.loader.error = False, WeightsError("not reproduced")
        with pytest.raises(WeightsError, match="not reproduced"):
            await place.fetcher.load(place.policy(1))
        place.loader.error = None
        await place.fetcher.load(place.policy(1))

    asyncio.run(scenario())
    assert [directory.name for directory in place.loader.loaded] == ["step_1"]
