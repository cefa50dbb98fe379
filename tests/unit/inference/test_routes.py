import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from trivet.algorithms.probe import ProbeResult
from trivet.config.schema.inference import InferenceConfig
from trivet.errors import FetchFailed, InferenceError, WeightsError
from trivet.inference.arguments import vllm_arguments
from trivet.inference.routes import add_gate, add_routes, make_router
from trivet.weights.manifest import Manifest
from trivet.wire.versions import FetchablePolicy, PolicyVersion, TransferRound

SERVED = {
    "status": "ok",
    "model": "m",
    "dtype": "float32",
    "asleep": False,
    "is_fetching": False,
    "probe_mismatch": None,
    "probe_limit": None,
    "source": "files",
    "num_workers": 2,
    "transfer_port": 0,
}


class FakeLoader:
    """A stand-in for PolicyLoader that returns one manifest, or raises."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.policy = Manifest(version=PolicyVersion(3), files={}, digest="abc")
        self.directories: list[Path] = []
        self.probe_result: ProbeResult | None = None
        self.dtype = "float32"
        self.is_asleep = False
        self.source = "files"
        self.transfer: TransferRound | None = None
        self.num_starts = 0
        self._error = error

    async def load(self, directory: Path, transfer: TransferRound | None = None) -> Manifest:
        self.directories.append(directory)
        self.transfer = transfer
        if self._error is not None:
            raise self._error
        return self.policy

    async def sleep(self) -> None:
        if self._error is not None:
            raise self._error
        self.is_asleep = True

    async def while_awake(self, change: Callable[[], Awaitable[object]]) -> None:
        if self.is_asleep:
            raise WeightsError("this server is asleep")
        await change()

    async def load_start(self) -> Manifest:
        self.num_starts += 1
        self.policy = Manifest(version=PolicyVersion(0), files={}, digest="start")
        return self.policy


class FakeEngine:
    num_workers = 2

    def __init__(self, *, error: Exception | None = None, is_stuck: bool = False) -> None:
        self._error = error
        self._is_stuck = is_stuck

    async def ping(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_stuck:
            await asyncio.Event().wait()


class FakeAdapters:
    """A stand-in that records what it served, and refuses an adapter without a name."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, Path]] = []

    async def load(self, name: str, *, path: Path) -> None:
        if path.name == "nothing":
            raise WeightsError(f"{path} holds no adapter")
        self.loaded.append((name, path))


def ask(
    method: str,
    path: str,
    *,
    loader: Any = None,
    engine: Any = None,
    adapters: Any = None,
    fetcher: Any = None,
    body: Any = None,
    can_sleep: bool = True,
) -> httpx.Response:
    app = FastAPI()

    @app.get("/health")
    async def stock_health() -> str:
        return "stock"

    @app.get("/version")
    async def stock_version() -> str:
        return "stock"

    router = make_router(
        loader or FakeLoader(),
        engine or FakeEngine(),
        model_name="m",
        adapters=adapters,
        fetcher=fetcher or FakeFetcher(),
        can_sleep=can_sleep,
        health_timeout_s=0.01,
    )
    add_routes(app, router)

    async def scenario() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(scenario())


def test_the_policy_is_reported_with_its_digest() -> None:
    served = SERVED | {"version": 3, "digest": "abc"}
    assert ask("GET", "/policy").json() == served
    loader = FakeLoader()
    loader.probe_result = ProbeResult(mismatch=1e-6, limit=1e-4)
    assert ask("GET", "/policy", loader=loader).json() == served | {"probe_mismatch": 1e-6, "probe_limit": 1e-4}


@pytest.mark.parametrize("can_sleep", [True, False])
def test_a_server_sleeps_and_says_so_or_refuses_where_it_has_no_memory_to_free(can_sleep: bool) -> None:
    loader = FakeLoader()
    response = ask("POST", "/sleep", loader=loader, can_sleep=can_sleep)
    assert response.status_code == (200 if can_sleep else 409)
    if not can_sleep:
        assert response.json()["reason"] == "this server was started without inference.sleep_while_training = true"
    assert ask("GET", "/policy", loader=loader).json()["asleep"] is can_sleep


class FakeFetcher:
    def __init__(self, *, error: Exception | None = None, is_fetching: bool = False) -> None:
        self.policies: list[FetchablePolicy] = []
        self.is_fetching = is_fetching
        self._error = error

    async def load(self, policy: FetchablePolicy) -> None:
        self.policies.append(policy)
        if self._error is not None:
            raise self._error


OFFER = {"version": 3, "digest": "a" * 64, "manifest_sha256": "b" * 64, "sources": ["http://origin:5556"]}


def test_an_update_may_name_sources_from_which_the_policy_is_fetched() -> None:
    fetcher = FakeFetcher(is_fetching=True)
    response = ask("POST", "/update_weights", fetcher=fetcher, body=OFFER)
    assert (response.status_code, response.json()["is_fetching"]) == (200, True)
    assert fetcher.policies == [FetchablePolicy(**OFFER | {"sources": ("http://origin:5556",)})]


@pytest.mark.parametrize(
    "changed",
    [{"sources": []}, {"sources": ["file:///etc/passwd"]}, {"digest": "../" * 20}, {"version": 0}, {"weight_dir": "/w/step_3"}],
)
def test_an_offer_that_is_none_is_refused(changed: dict[str, object]) -> None:
    assert ask("POST", "/update_weights", fetcher=FakeFetcher(), body=OFFER | changed).status_code == 422


def test_a_policy_that_could_not_be_fetched_may_be_asked_for_again_and_a_refused_one_not() -> None:
    for error, status in ((FetchFailed("no source"), 500), (WeightsError("altered"), 409)):
        response = ask("POST", "/update_weights", fetcher=FakeFetcher(error=error), body=OFFER)
        assert (response.status_code, response.json()["reason"]) == (status, str(error))


def test_an_update_and_a_way_back_to_the_start_answer_with_what_serves_after_it() -> None:
    loader = FakeLoader()
    response = ask("POST", "/update_weights", loader=loader, body={"weight_dir": "/w/step_3"})
    assert response.json() == SERVED | {"version": 3, "digest": "abc"}
    assert loader.directories == [Path("/w/step_3")]
    assert ask("POST", "/reload_weights").json() == SERVED | {"version": 0, "digest": "start"}


@pytest.mark.parametrize(
    ("error", "status_code"), [(WeightsError("/w/step_3 is cut short"), 409), (InferenceError("/w/step_3 does not fit"), 500)]
)
def test_a_refused_update_gives_the_whole_reason(error: Exception, status_code: int) -> None:
    response = ask("POST", "/update_weights", loader=FakeLoader(error=error), body={"weight_dir": "/w/step_3"})
    assert response.status_code == status_code
    assert response.json()["reason"] == str(error)


def test_an_update_by_a_transfer_hands_the_round_on() -> None:
    transfer = TransferRound(
        version=PolicyVersion(3), digest="d", group_id="g", host="h", port=7, world_size=3, timeout_s=2.0, rank_offset=1
    )
    loader = FakeLoader()
    body = {"weight_dir": "/w/step_3", "transfer": msgspec.to_builtins(transfer)}
    assert ask("POST", "/update_weights", loader=loader, body=body).status_code == 200
    assert loader.transfer == transfer


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"weight_dir": "w/step_3"},
        {"weight_dir": "/w/step_3", "version": 3},
        {"weight_dir": "/w/step_3", "transfer": {"version": 3}},
        {"weight_dir": "/w/step_3", "transfer": "now"},
    ],
)
def test_a_body_that_is_not_exactly_an_absolute_directory_is_refused(body: dict[str, Any]) -> None:
    assert ask("POST", "/update_weights", body=body).status_code == 422


def test_health_asks_the_engine_and_takes_the_place_of_the_stock_route() -> None:
    response = ask("GET", "/health")
    assert (response.status_code, response.content) == (200, b"")
    assert ask("GET", "/version").json() == "stock"


def test_an_engine_that_failed_or_is_stuck_makes_the_server_unhealthy() -> None:
    failed = ask("GET", "/health", engine=FakeEngine(error=RuntimeError("dead")))
    assert (failed.status_code, failed.json()["reason"]) == (503, "the engine failed: RuntimeError: dead")
    stuck = ask("GET", "/health", engine=FakeEngine(is_stuck=True))
    assert (stuck.status_code, stuck.json()["reason"]) == (503, "the engine did not answer within 0 s")


def test_an_adapter_is_loaded_under_its_name_as_often_as_asked_but_not_while_the_server_sleeps() -> None:
    adapters, loader = FakeAdapters(), FakeLoader()
    for path in ("/a/1", "/a/2"):
        response = ask("POST", "/load_lora_adapter", adapters=adapters, body={"lora_name": "mine", "lora_path": path})
        assert response.json() == {"status": "ok", "lora_name": "mine", "lora_path": path}
    loader.is_asleep = True
    body = {"lora_name": "mine", "lora_path": "/a/3"}
    response = ask("POST", "/load_lora_adapter", loader=loader, adapters=adapters, body=body)
    assert (response.status_code, response.json()["reason"]) == (409, "this server is asleep")
    assert adapters.loaded == [("mine", Path("/a/1")), ("mine", Path("/a/2"))]


@pytest.mark.parametrize(
    ("adapters", "name", "path", "reason"),
    [
        (None, "mine", "/a/1", "started without inference.enable_lora = true"),
        (FakeAdapters(), "m", "/a/1", "m is the policy's own name"),
        (FakeAdapters(), "mine", "/a/nothing", "/a/nothing holds no adapter"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_with_the_reason(adapters: Any, name: str, path: str, reason: str) -> None:
    response = ask("POST", "/load_lora_adapter", adapters=adapters, body={"lora_name": name, "lora_path": path})
    assert response.status_code == 409
    assert reason in response.json()["reason"]


TOKEN = "ab" * 32
BEARER = {"Authorization": f"Bearer {TOKEN}"}
EVIL = {"Origin": "https://evil.example"}
CHANGES = [
    *(("POST", f"/{name}") for name in ("update_weights", "reload_weights", "load_lora_adapter", "sleep", "pause")),
    *(("POST", f"/v1/{name}") for name in ("load_lora_adapter", "unload_lora_adapter")),
    *(("POST", f"/{name}") for name in ("collective_rpc", "reset_prefix_cache", "start_profile", "abort_requests")),
    *(("GET", f"/{name}") for name in ("server_info", "a_route_of_tomorrow")),
]
ASKED = [("GET", "/health"), ("GET", "/policy"), ("GET", "/metrics"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")]


def ask_guarded(method: str, path: str, *, host: str = "127.0.0.1", loader: Any = None, **request: Any) -> httpx.Response:
    """Ask a server that listens on `host` and has every route; return its answer."""
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def vllm(path: str) -> str:
        return path

    engine: Any = FakeEngine()
    fetcher: Any = FakeFetcher()
    add_routes(app, make_router(loader or FakeLoader(), engine, model_name="m", fetcher=fetcher))
    arguments = vllm_arguments(InferenceConfig(), is_cpu=True, run_secret=TOKEN)
    app.add_middleware(CORSMiddleware, allow_origins=arguments["allowed_origins"], allow_methods=["*"], allow_headers=["*"])
    add_gate(app, token=TOKEN, host=host)

    async def scenario() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, **request)

    return asyncio.run(scenario())


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_what_changes_the_server_wants_the_secret(method: str, path: str) -> None:
    response = ask_guarded(method, path)
    assert response.status_code == 401
    assert "TRIVET_SECRET_FILE" in response.json()["reason"]
    for wrong in ("Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}\xff"):
        assert ask_guarded(method, path, headers={"Authorization": wrong.encode("latin-1")}).status_code == 401
    assert ask_guarded(method, path, headers=BEARER).status_code in (200, 409, 422)


@pytest.mark.parametrize(("method", "path"), ASKED)
def test_whoever_reaches_the_server_may_ask(method: str, path: str) -> None:
    assert ask_guarded(method, path).status_code == 200


def test_a_web_page_can_neither_reload_the_weights_nor_learn_that_it_might() -> None:
    """In the attack, a page of another site posts what a browser sends unasked, and asks whether it may send the rest."""
    loader = FakeLoader()
    assert ask_guarded("POST", "/reload_weights", loader=loader, headers=EVIL).status_code == 401
    assert loader.num_starts == 0
    preflight = EVIL | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for path in ("/update_weights", "/reload_weights", "/v1/chat/completions"):
        assert "access-control-allow-origin" not in ask_guarded("OPTIONS", path, headers=preflight).headers
    assert "access-control-allow-origin" not in ask_guarded("GET", "/policy", headers=EVIL).headers


def test_a_name_that_was_led_to_loopback_is_no_name_of_the_server() -> None:
    for name in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[", "localhost@evil.example:80"):
        assert ask_guarded("GET", "/policy", headers={"Host": name}).status_code == 403
    for name in ("localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
        assert ask_guarded("GET", "/policy", headers={"Host": name}).status_code == 200


def test_a_server_for_other_machines_is_asked_by_any_name() -> None:
    assert ask_guarded("GET", "/policy", host="0.0.0.0", headers={"Host": "node-3:8000"}).status_code == 200
    assert ask_guarded("POST", "/reload_weights", host="0.0.0.0", headers={"Host": "node-3:8000"}).status_code == 401
