import asyncio
import contextlib

import pytest

from trivet.client.inference_client import PolicyStatus
from trivet.config.layout import RunLayout
from trivet.errors import InferenceError, WaitTimeout
from trivet.orchestrator.policy import READER, PolicyWatcher
from trivet.weights.manifest import read_manifest
from trivet.weights.publish import publish
from trivet.weights.retention import reader_versions
from trivet.wire.events import Event, Load
from trivet.wire.versions import PolicyVersion, Step


class Server:
    """Loads what it is told, and reports it."""

    base_url = "http://127.0.0.1:1"

    def __init__(self, *, digest: str | None = None, version: int = 0) -> None:
        self._digest = digest
        self._status = PolicyStatus(version=PolicyVersion(version), digest="start")
        self.loaded: list[int] = []

    async def update_weights(self, directory) -> PolicyStatus:
        manifest = read_manifest(directory)
        self.loaded.append(manifest.version)
        self._status = PolicyStatus(version=manifest.version, digest=self._digest or manifest.digest)
        return self._status

    async def reload_weights(self) -> PolicyStatus:
        self.loaded.append(0)
        self._status = PolicyStatus(version=PolicyVersion(0), digest="start")
        return self._status

    async def policy(self) -> PolicyStatus:
        return self._status


@pytest.fixture
def layout(tmp_path) -> RunLayout:
    return RunLayout(tmp_path)


def publish_policy(layout: RunLayout, version: int) -> None:
    publish(
        layout,
        version=PolicyVersion(version),
        run_id="r",
        write=lambda directory: (directory / "model.safetensors").write_bytes(bytes([version])) and None,
    )


def make_watcher(layout, *servers, clock=lambda: 0.0, strict=False, level=1, events=None, loads=None) -> PolicyWatcher:
    return PolicyWatcher(
        layout=layout,
        servers=servers,
        max_async_level=level,
        is_strict=strict,
        timeout_s=60.0,
        write_event=(events if events is not None else []).append,
        on_load=(loads if loads is not None else []).append,
        clock=clock,
    )


async def run_until_loaded(watcher: PolicyWatcher, version: int) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await watcher.run()
    assert watcher.version == version


def test_the_newest_policy_is_loaded_on_every_server_and_acknowledged(layout):
    for version in (1, 2):
        publish_policy(layout, version)
    servers, events, loads = [Server(), Server()], [], []
    watcher = make_watcher(layout, *servers, events=events, loads=loads)
    watcher.step = Step(3)
    asyncio.run(run_until_loaded(watcher, 2))
    assert [server.loaded for server in servers] == [[2], [2]]
    assert loads == [2]
    assert reader_versions(layout) == {READER: 2}
    digest = read_manifest(layout.weights_step(2)).digest
    assert [event.digest for event in events if isinstance(event, Load)] == [digest, digest]


def test_a_strict_run_loads_exactly_the_policy_that_lags(layout):
    for version in (1, 2, 3):
        publish_policy(layout, version)
    server = Server()
    watcher = make_watcher(layout, server, strict=True)
    watcher.step = Step(4)
    asyncio.run(run_until_loaded(watcher, 2))
    assert server.loaded == [2]


def test_a_server_that_reports_another_digest_ends_the_run(layout):
    publish_policy(layout, 1)
    watcher = make_watcher(layout, Server(digest="other"))
    watcher.step = Step(2)
    with pytest.raises(InferenceError, match="another run may use the same server"):
        asyncio.run(watcher.load(PolicyVersion(1)))
    assert reader_versions(layout) == {}


def test_a_trainer_that_publishes_nothing_is_named(layout):
    now = iter(range(0, 10_000, 50))
    watcher = make_watcher(layout, Server(), clock=lambda: float(next(now)))
    watcher.step = Step(5)
    with pytest.raises(WaitTimeout, match="waited 60 s for policy 3 to fill batch 5"):
        asyncio.run(watcher.run())


def test_a_fresh_run_resets_servers_or_refuses_what_they_hold(layout):
    events: list[Event] = []
    server = Server(version=4)
    with pytest.raises(InferenceError, match="holds policy 4 and the run starts from the base model"):
        asyncio.run(make_watcher(layout, server).start_from_base(reload=False))
    asyncio.run(make_watcher(layout, server, events=events).start_from_base(reload=True))
    assert server.loaded == [0]
    assert reader_versions(layout) == {READER: 0}


def test_a_resume_waits_until_its_policy_is_published_again(layout):
    server = Server()
    watcher = make_watcher(layout, server)

    async def scenario() -> None:
        waiting = asyncio.create_task(watcher.await_policy(PolicyVersion(6)))
        await asyncio.sleep(0)
        assert not waiting.done()
        publish_policy(layout, 6)
        await waiting

    asyncio.run(scenario())
    assert server.loaded == [6]
    assert watcher.version == 6
