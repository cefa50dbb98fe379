"""Servers of a run are asked directly and services of others through the proxies of a company network, by real requests."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing

import httpx
import pytest
from openai import AsyncOpenAI

from support.fake_inference import FakeInference
from support.http_fake import serve, serve_fake
from trivet.client.inference_client import InferenceClient
from trivet.config.schema.environment import EnvConfig
from trivet.config.schema.inference import ClientConfig
from trivet.environments.apis.v0 import load as v0
from trivet.environments.settings import host_settings
from trivet.errors import ConfigError
from trivet.process.proxies import direct_variables, find_proxies, find_unusable, is_direct
from trivet.telemetry.telemetry import Heartbeat

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
SOCKS = "socks5://127.0.0.1:9"
FOREIGN = "http://judge.example.com/v1"
CLIENTS = {
    "httpx": "import httpx; httpx.get(url)",
    "requests": "import requests; requests.get(url)",
    "urllib": "import urllib.request; urllib.request.urlopen(url).read()",
    "aiohttp": (
        "import asyncio, aiohttp\n"
        "async def ask():\n"
        " async with aiohttp.ClientSession(trust_env=True) as session:\n"
        "  async with session.get(url): pass\n"
        "asyncio.run(ask())"
    ),
}


@pytest.fixture(autouse=True)
def _without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names a proxy for everything, and yields the addresses that it is asked for."""
    asked: list[str] = []

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked.append(path)
        return 200, b"{}"

    with serve(answer) as url:
        for name in VARIABLES[:3]:
            monkeypatch.setenv(name, url)
            monkeypatch.setenv(name.upper(), url)
        yield asked


def ask(url: str, *, is_direct: bool = True) -> None:
    async def scenario() -> None:
        client = InferenceClient(url, timeout_s=5, find_token=lambda: "secret", is_direct=is_direct)
        async with aclosing(client):
            await client.check_health(timeout_s=5)
            await client.reload_weights()

    asyncio.run(scenario())


def worker_client(url: str, environ: dict[str, str]) -> AsyncOpenAI:
    settings = host_settings(EnvConfig(id="any"), model_name="m", client=ClientConfig(base_url=[url]))
    return v0.make_client(settings, environ, url).client


def test_roles_and_workers_ask_the_servers_of_the_run_directly_and_others_through_the_proxy(proxied: list[str]) -> None:
    async def list_models(url: str) -> None:
        async with worker_client(url, {}) as client:
            await client.get("/models", cast_to=httpx.Response)

    with serve_fake(FakeInference()) as url:
        ask(url)
        asyncio.run(list_models(url))
    assert proxied == []
    asyncio.run(list_models(FOREIGN))
    assert proxied == [f"{FOREIGN}/models"]


@pytest.mark.parametrize("library", CLIENTS)
def test_clients_of_environments_reach_the_teacher_directly_and_a_foreign_judge_through_the_proxy(
    proxied: list[str], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(url: str) -> None:
        subprocess.run([sys.executable, "-c", f"url = {url!r}\n{CLIENTS[library]}"], check=True, timeout=30)

    with serve(lambda method, path, body: (200, b"{}")) as teacher:
        for name, value in direct_variables(os.environ, [teacher]).items():
            monkeypatch.setenv(name, value)
        get(f"{teacher}/health")
        assert proxied == []
        get(FOREIGN)
        assert proxied == [FOREIGN]


@pytest.mark.parametrize("proxy", [SOCKS, "socks://127.0.0.1:9"])
def test_a_proxy_that_cannot_be_used_matters_to_services_of_others_alone(
    proxy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with serve_fake(FakeInference()) as url:
        ask(url)
    worker_client("http://127.0.0.1:8000/v1", {})
    with pytest.raises(ConfigError, match=r"judge\.example\.com cannot be asked through the proxy"):
        ask(FOREIGN, is_direct=False)
    heartbeat = Heartbeat(FOREIGN)
    heartbeat.send()
    heartbeat.close()
    assert "heartbeat.url was not reached" in caplog.text


def test_the_proxies_that_cannot_be_used_are_named_with_the_remedy_and_none_with_its_password() -> None:
    assert find_unusable({"HTTPS_PROXY": "http://proxy:3128"}) is None
    assert "uv pip install socksio" in str(find_unusable({"ALL_PROXY": SOCKS}))
    assert "socks5://" in str(find_unusable({"all_proxy": "socks://proxy:1"}))
    assert find_proxies({"http_proxy": "http://me:planted@proxy:3128"}) == {"http_proxy": "http://proxy:3128"}


@pytest.mark.parametrize(
    ("url", "environ", "expected"),
    [
        ("http://127.0.0.1:8000/v1", {}, True),
        ("http://[fd00::1]:8000/v1", {}, True),
        ("http://10.1.2.3:8000/v1", {}, True),
        ("http://gpu-7:8000/v1", {}, True),
        ("https://judge.example.com/v1", {}, False),
        ("https://gpu.corp.example.com/v1", {"NO_PROXY": "other,.corp.example.com"}, True),
    ],
)
def test_a_server_is_asked_directly_by_its_address(url: str, environ: dict[str, str], expected: bool) -> None:
    assert is_direct(url, environ) is expected


def test_the_hosts_of_the_run_are_added_to_those_that_the_user_named() -> None:
    found = direct_variables({"HTTP_PROXY": "http://proxy:1", "NO_PROXY": "corp"}, ["http://gpu.corp.example.com:8000/v1"])
    assert found == dict.fromkeys(("no_proxy", "NO_PROXY"), "corp,localhost,127.0.0.1,::1,gpu.corp.example.com")
    assert direct_variables({"NO_PROXY": "corp"}, ["http://gpu"]) == {}
