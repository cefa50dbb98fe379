"""Test how servers behind a DNS name or in a file are found, in virtual time."""

import asyncio
import random
from pathlib import Path

import pytest

from support.simulated_run import SimulatedServer
from support.virtual_time import run_virtually
from trivet.client.server_pool import ServerPool
from trivet.config.schema.inference import ClientConfig, ElasticConfig
from trivet.errors import InferenceError


class Name:
    """A DNS name whose addresses the test sets, and a pool of the servers behind it."""

    def __init__(self, *addresses: str, config: ElasticConfig | None = None) -> None:
        self.addresses: list[str] | OSError = list(addresses)
        self.pool = ServerPool(
            ClientConfig(elastic=config or ElasticConfig(hostname="inference.local", port=80), wait_for_ready_timeout=5.0),
            make_client=lambda url: SimulatedServer(url, random.Random(0)),  # type: ignore[arg-type, return-value]
            write_event=lambda event: None,
            resolve=self._resolve,
            clock=asyncio.get_running_loop().time,
        )

    async def _resolve(self, hostname: str) -> list[str]:
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses

    @property
    def roots(self) -> list[str]:
        return list(self.pool.servers)


def test_the_start_waits_for_a_server_that_answers():
    async def scenario() -> None:
        name = Name()
        with pytest.raises(InferenceError, match="was ready within 5 s: it names no address"):
            await name.pool.start()
        name.addresses = ["10.0.0.1", "::1"]
        await name.pool.start()
        assert name.roots == ["http://10.0.0.1:80", "http://[::1]:80"]

    run_virtually(scenario(), limit_s=60)


def test_a_file_of_a_run_over_nodes_says_where_its_servers_are_now(tmp_path: Path):
    file = tmp_path / ".servers"

    async def scenario() -> None:
        name = Name(config=ElasticConfig(servers_file=file))
        with pytest.raises(InferenceError, match=r"no server of client\.elastic\.servers_file = '.*' was ready"):
            await name.pool.start()
        file.write_text("http://10.0.0.1:8000/v1\nhttp://10.0.0.2:8001/v1\n")
        await name.pool.start()
        assert name.roots == ["http://10.0.0.1:8000", "http://10.0.0.2:8001"]
        file.write_text("http://10.0.0.1:8000/v1\nhttp://10.0.0.3:8001/v1\n")
        await name.pool.start()
        assert name.roots == ["http://10.0.0.1:8000", "http://10.0.0.3:8001"]

    run_virtually(scenario(), limit_s=60)


@pytest.mark.parametrize("values", [{}, {"hostname": "a", "servers_file": "b"}])
def test_one_source_says_where_servers_are(values: dict[str, str]):
    with pytest.raises(ValueError, match="set hostname or servers_file"):
        ElasticConfig.model_validate(values)


def test_servers_follow_the_name_and_stay_while_it_cannot_be_looked_up():
    async def scenario() -> None:
        name = Name("a")
        await name.pool.start()
        running = asyncio.create_task(name.pool.run())
        name.addresses = OSError("no answer")
        await asyncio.sleep(6)
        assert name.roots == ["http://a:80"]
        name.addresses = ["b"]
        await asyncio.sleep(6)
        assert name.roots == ["http://b:80"]
        assert await name.pool.is_at_fault("http://a:80")
        running.cancel()

    run_virtually(scenario(), limit_s=60)
