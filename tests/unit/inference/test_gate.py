"""Strangers and web pages ask our routes behind the gate, with vLLM's CORS middleware as the server configures it."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from trivet.config.schema.inference import InferenceConfig
from trivet.inference.arguments import vllm_arguments
from trivet.inference.gate import guard
from trivet.inference.routes import add_routes, make_router
from trivet.weights.manifest import Manifest
from trivet.wire.versions import PolicyVersion

TOKEN = "ab" * 32
BEARER = {"Authorization": f"Bearer {TOKEN}"}
EVIL = {"Origin": "https://evil.example"}
CHANGES = [
    ("POST", "/update_weights"),
    ("POST", "/reload_weights"),
    ("POST", "/load_lora_adapter"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/sleep"),
    ("POST", "/pause"),
    ("POST", "/collective_rpc"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/start_profile"),
    ("POST", "/abort_requests"),
    ("GET", "/server_info"),
    ("GET", "/a_route_of_tomorrow"),
]
ASKED = [("GET", "/health"), ("GET", "/policy"), ("GET", "/metrics"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")]


class Loader:
    """A loader that counts its loads."""

    def __init__(self) -> None:
        self.policy = Manifest(version=PolicyVersion(0), files={}, digest="start")
        self.num_loads = 0
        self.is_asleep = False
        self.probe_result = None
        self.dtype = "float32"

    async def load_start(self) -> Manifest:
        self.num_loads += 1
        return self.policy

    async def load(self, directory: Any) -> Manifest:
        return await self.load_start()


class Engine:
    async def ping(self) -> None:
        pass


def ask(method: str, path: str, *, host: str = "127.0.0.1", loader: Any = None, **request: Any) -> httpx.Response:
    """Ask a server that listens on `host` and has every route; return its answer."""
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def vllm(path: str) -> str:
        return path

    add_routes(app, make_router(loader or Loader(), Engine(), model_name="m"))
    arguments = vllm_arguments(InferenceConfig(), is_cpu=True, token=TOKEN)
    app.add_middleware(CORSMiddleware, allow_origins=arguments["allowed_origins"], allow_methods=["*"], allow_headers=["*"])
    guard(app, token=TOKEN, host=host)

    async def scenario() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, **request)

    return asyncio.run(scenario())


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_what_changes_the_server_wants_the_secret(method: str, path: str) -> None:
    response = ask(method, path)
    assert response.status_code == 401
    assert "TRIVET_SECRET_FILE" in response.json()["reason"]
    for wrong in ("Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}\xff"):
        assert ask(method, path, headers={"Authorization": wrong.encode("latin-1")}).status_code == 401
    assert ask(method, path, headers=BEARER).status_code in (200, 409, 422)


@pytest.mark.parametrize(("method", "path"), ASKED)
def test_whoever_reaches_the_server_may_ask(method: str, path: str) -> None:
    assert ask(method, path).status_code == 200


def test_a_web_page_can_neither_reload_the_weights_nor_learn_that_it_might() -> None:
    """In the attack, a page of another site posts what a browser sends unasked, and asks whether it may send the rest."""
    loader = Loader()
    assert ask("POST", "/reload_weights", loader=loader, headers=EVIL).status_code == 401
    assert loader.num_loads == 0
    preflight = EVIL | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for path in ("/update_weights", "/reload_weights", "/v1/chat/completions"):
        assert "access-control-allow-origin" not in ask("OPTIONS", path, headers=preflight).headers
    assert "access-control-allow-origin" not in ask("GET", "/policy", headers=EVIL).headers


def test_a_name_that_was_led_to_loopback_is_no_name_of_the_server() -> None:
    for name in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[", "localhost@evil.example:80"):
        assert ask("GET", "/policy", headers={"Host": name}).status_code == 403
    for name in ("localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
        assert ask("GET", "/policy", headers={"Host": name}).status_code == 200


def test_a_server_for_other_machines_is_asked_by_any_name() -> None:
    assert ask("GET", "/policy", host="0.0.0.0", headers={"Host": "node-3:8000"}).status_code == 200
    assert ask("POST", "/reload_weights", host="0.0.0.0", headers={"Host": "node-3:8000"}).status_code == 401
