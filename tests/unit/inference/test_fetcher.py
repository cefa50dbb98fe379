import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.policy_servers import TOKEN, PolicyServer, publish_files
from trivet.config.layout import RunLayout
from trivet.errors import FetchFailed, WeightsError
from trivet.inference import fetcher as module
from trivet.inference.fetcher import PolicyFetcher
from trivet.storage.durable import list_files
from trivet.weights.fetch import PolicyCache
from trivet.weights.manifest import Manifest, offer_policy, verify
from trivet.wire.versions import FetchablePolicy


class FakeLoader:
    def __init__(self) -> None:
        self.max_bytes = 1 << 20
        self.loaded: list[Path] = []
        self.error: WeightsError | None = None

    async def load(self, directory: Path, *, is_verified: bool) -> Manifest:
        assert is_verified
        if self.error is not None:
            raise self.error
        self.loaded.append(directory)
        return verify(directory)


class Place:
    def __init__(self, root: Path) -> None:
        self.layout = RunLayout(root / "run")
        for version in (1, 2, 3):
            publish_files(self.layout, version, model=bytes([version]) * 10)
        self.gate, self.is_broken = threading.Event(), False
        self.gate.set()
        self.origin, self.loader = PolicyServer(self.layout.weights, spoil=self.spoil), FakeLoader()
        self.cache = PolicyCache(root / "cache", run="run", token=TOKEN, environ={})
        self.fetcher = PolicyFetcher(self.loader, self.cache)

    def spoil(self, path: str, num_sent: int, body: bytes) -> bytes:
        """Send bytes once the gate is open."""
        self.gate.wait(20)
        return bytes(len(body)) if self.is_broken else body

    def policy(self, version: int) -> FetchablePolicy:
        return offer_policy(self.layout.weights_step(version), sources=[self.origin.url])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    with made.origin, closing(made.cache):
        yield made


def test_a_policy_is_loaded_once_all_of_it_is_here_and_requests_are_answered_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ANSWER_INTERVAL_S", 0.01)

    async def scenario() -> None:
        place.gate.clear()
        for _ in range(3):
            await place.fetcher.load(place.policy(1))
            assert place.fetcher.is_fetching
            assert place.loader.loaded == []
        place.gate.set()
        while place.fetcher.is_fetching:
            await place.fetcher.load(place.policy(1))

    asyncio.run(scenario())
    assert place.loader.loaded == [place.cache.directory / "step_1"]
    assert len(place.origin.requests) == len(list_files(place.layout.weights_step(1))) - 1, "one fetch, and none of STABLE"


def test_a_later_policy_ends_the_fetch_of_an_earlier_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_INTERVAL_S", 0.01)

    async def scenario() -> None:
        place.gate.clear()
        await place.fetcher.load(place.policy(1))
        await place.fetcher.load(place.policy(2))
        place.gate.set()
        while place.fetcher.is_fetching:
            await place.fetcher.load(place.policy(2))

    asyncio.run(scenario())
    assert [directory.name for directory in place.loader.loaded] == ["step_2"]
    assert not (place.cache.directory / "step_1").exists()


def test_after_a_failed_fetch_or_load_the_next_request_tries_again(place: Place) -> None:
    async def scenario() -> None:
        place.is_broken = True
        with pytest.raises(FetchFailed, match="is not what was published"):
            await place.fetcher.load(place.policy(1))
        assert not place.fetcher.is_fetching
        place.is_broken, place.loader.error = False, WeightsError("not reproduced")
        with pytest.raises(WeightsError, match="not reproduced"):
            await place.fetcher.load(place.policy(1))
        place.loader.error = None
        await place.fetcher.load(place.policy(1))

    asyncio.run(scenario())
    assert [directory.name for directory in place.loader.loaded] == ["step_1"]
