"""The limit of rollouts in flight against a real server whose KV cache holds few of them."""

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from support.servers import open_client, run_server
from trivet.client.inference_client import InferenceClient
from trivet.client.server_load import ServerLoad
from trivet.config.schema.inference import ConcurrencyConfig
from trivet.orchestrator.dispatcher import ChangeEvent
from trivet.orchestrator.load_watcher import LoadWatcher

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
NUM_REQUESTS = 240


class Requests:
    """Keeps as many requests in flight as `max_in_flight` allows. It stands in for servers and dispatcher."""

    def __init__(self, client: InferenceClient) -> None:
        self.client = client
        self.max_in_flight = self.highest_in_flight = 64
        self.rollouts_in_flight = 0
        self.changed = ChangeEvent()

    async def server_loads(self, *, does_limit: bool = False) -> list[ServerLoad]:
        load = await self.client.server_load()
        assert load is not None
        return [load]

    async def send_all(self) -> int:
        """Return the number of tokens that were sampled."""

        async def send(index: int) -> int:
            answer = await self.client.generate([4 + index % 90] * 20, max_tokens=60 + 37 * index % 400, temperature=1.0)
            self.rollouts_in_flight -= 1
            self.changed.notify()
            return len(answer.token_ids)

        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[int]] = []
            for index in range(NUM_REQUESTS):
                while self.rollouts_in_flight >= self.max_in_flight:
                    await self.changed.wait(1.0)
                self.rollouts_in_flight += 1
                tasks.append(group.create_task(send(index)))
        return sum(task.result() for task in tasks)


def test_a_small_cache_is_preempted_less_than_with_a_fixed_number(tiny_model: Path, tmp_path: Path) -> None:
    async def measure(base_url: str, config: ConcurrencyConfig) -> tuple[int, float, int]:
        async with aclosing(open_client(base_url, timeout_s=480)) as client:
            requests, before = Requests(client), await client.server_load()
            assert before is not None
            started = time.monotonic()
            watching = asyncio.create_task(LoadWatcher(config, servers=requests, dispatcher=requests).run())  # type: ignore[arg-type]  # acts as both
            num_tokens = await requests.send_all()
            watching.cancel()
            after = await client.server_load()
            assert after is not None
            return (
                after.num_preemptions - before.num_preemptions,
                num_tokens / (time.monotonic() - started),
                requests.max_in_flight,
            )

    with run_server(tiny_model, log=tmp_path / "inference.stdout", cpu_kv_cache_gib="0.004") as server:
        fixed = asyncio.run(measure(server.base_url, ConcurrencyConfig(adaptive=False)))
        adaptive = asyncio.run(measure(server.base_url, ConcurrencyConfig(interval=0.5)))
    print(f"preemptions, tokens/s, limit at the end: fixed {fixed}, adaptive {adaptive}")
    assert fixed[0] > 10, "without preemptions the test shows nothing"
    assert adaptive[0] < 0.7 * fixed[0]
