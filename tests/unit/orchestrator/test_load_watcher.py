import asyncio
from dataclasses import dataclass, field

from support.virtual_time import run_virtually
from trivet.client.server_load import ServerLoad
from trivet.config.schema.inference import ConcurrencyConfig
from trivet.orchestrator.dispatcher import ChangeEvent
from trivet.orchestrator.load_watcher import LoadWatcher


@dataclass
class Flow:
    """A stand-in for the dispatcher with the allowed number of rollouts in flight."""

    max_in_flight: int
    highest_in_flight: int = 1000
    changed: ChangeEvent = field(default_factory=ChangeEvent)

    @property
    def rollouts_in_flight(self) -> int:
        return self.max_in_flight


@dataclass
class Engine:
    """A server whose cache has space for some sequences. It recomputes the others again and again."""

    flow: Flow
    capacity: int
    num_preemptions: int = 0

    async def server_loads(self, *, does_limit: bool = False) -> list[ServerLoad]:
        too_many = max(0, self.flow.max_in_flight - self.capacity)
        self.num_preemptions += too_many
        running = min(self.flow.max_in_flight, self.capacity)
        return [
            ServerLoad(
                num_running=running,
                num_waiting=too_many,
                num_preemptions=self.num_preemptions,
                kv_usage=running / self.capacity,
            )
        ]


class Silent:
    async def server_loads(self, *, does_limit: bool = False) -> list[ServerLoad]:
        return []


def watch(config: ConcurrencyConfig, flow: Flow, servers, *, seconds: float) -> LoadWatcher:
    async def scenario() -> LoadWatcher:
        watcher = LoadWatcher(config, servers=servers, dispatcher=flow)  # type: ignore[arg-type]  # acts as one
        running = asyncio.create_task(watcher.run())
        await asyncio.sleep(seconds)
        assert not running.done()
        running.cancel()
        return watcher

    return run_virtually(scenario(), limit_s=2 * seconds + 1)


def test_the_limit_settles_around_what_the_cache_holds():
    flow = Flow(max_in_flight=1000)
    watcher = watch(ConcurrencyConfig(), flow, Engine(flow, capacity=200), seconds=300)
    assert 150 <= flow.max_in_flight <= 260
    assert watcher.metrics()["concurrency/limit"] == flow.max_in_flight


class Veterans:
    """Two servers with counts from before the run, one of which is away for a while."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def server_loads(self, *, does_limit: bool = False) -> list[ServerLoad]:
        self.num_asked += 1
        load = ServerLoad(num_running=64, num_waiting=0, num_preemptions=1000, kv_usage=0.5)
        return [load] if self.num_asked == 3 else [load, load]


def test_what_servers_counted_before_they_were_asked_lowers_nothing():
    flow = Flow(max_in_flight=128, highest_in_flight=128)
    servers = Veterans()
    watcher = watch(ConcurrencyConfig(interval=1.0), flow, servers, seconds=6.5)
    assert (servers.num_asked, flow.max_in_flight) == (6, 128)
    assert watcher.metrics()["concurrency/preempted"] == 0.0


def test_a_fixed_limit_starts_where_it_is_told_and_stays():
    flow = Flow(max_in_flight=1000)
    watch(ConcurrencyConfig(adaptive=False, initial_inflight=300), flow, Engine(flow, capacity=10), seconds=60)
    assert flow.max_in_flight == 300
