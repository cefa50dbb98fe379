import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from trivet.algorithms.probe import ProbeResult
from trivet.errors import InferenceError, WeightsError
from trivet.inference.routes import add_routes, make_router
from trivet.weights.manifest import Manifest
from trivet.wire.versions import PolicyVersion

NO_PROBE = {"probe_mismatch": None, "probe_limit": None, "dtype": "float32"}


class FakeLoader:
    """A stand-in for PolicyLoader that returns one manifest, or raises."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.policy = Manifest(version=PolicyVersion(3), files={}, digest="abc")
        self.directories: list[Path] = []
        self.probe_result: ProbeResult | None = None
        self.dtype = "float32"
        self.is_asleep = False
        self._error = error

    async def load(self, directory: Path) -> Manifest:
        self.directories.append(directory)
        if self._error is not None:
            raise self._error
        return self.policy

    async def sleep(self) -> None:
        if self._error is not None:
            raise self._error
        self.is_asleep = True

    @asynccontextmanager
    async def keep_awake(self) -> AsyncGenerator[None, None]:
        if self.is_asleep:
            raise WeightsError("this server is asleep")
        yield

    async def load_start(self) -> Manifest:
        return Manifest(version=PolicyVersion(0), files={}, digest="start")


class FakeEngine:
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
        can_sleep=can_sleep,
        health_timeout_s=0.01,
    )
    add_routes(app, router)

    async def scenario() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(scenario())


def test_the_policy_is_reported_with_its_digest() -> None:
    served = {"model": "m", "version": 3, "digest": "abc", "dtype": "float32", "asleep": False}
    assert ask("GET", "/policy").json() == served | NO_PROBE
    loader = FakeLoader()
    loader.probe_result = ProbeResult(mismatch=1e-6, limit=1e-4)
    assert ask("GET", "/policy", loader=loader).json() == served | {"probe_mismatch": 1e-6, "probe_limit": 1e-4}


def test_a_server_that_was_put_to_sleep_says_so() -> None:
    loader = FakeLoader()
    assert ask("POST", "/sleep", loader=loader).json() == {"status": "ok"}
    assert ask("GET", "/policy", loader=loader).json()["asleep"] is True


def test_a_server_without_memory_to_free_refuses_to_sleep() -> None:
    loader = FakeLoader()
    response = ask("POST", "/sleep", loader=loader, can_sleep=False)
    assert response.status_code == 409
    assert response.json()["reason"] == "this server was started without inference.sleep_while_training = true"
    assert not loader.is_asleep


def test_a_failed_sleep_gives_its_reason() -> None:
    response = ask("POST", "/sleep", loader=FakeLoader(error=InferenceError("the engine did not sleep: the server ends")))
    assert response.status_code == 500
    assert "did not sleep" in response.json()["reason"]


def test_an_update_answers_with_what_serves_after_it() -> None:
    loader = FakeLoader()
    response = ask("POST", "/update_weights", loader=loader, body={"weight_dir": "/w/step_3"})
    assert response.json() == {"status": "ok", "version": 3, "digest": "abc"} | NO_PROBE
    assert loader.directories == [Path("/w/step_3")]


def test_going_back_to_the_start_answers_version_0() -> None:
    assert ask("POST", "/reload_weights").json() == {"status": "ok", "version": 0, "digest": "start"} | NO_PROBE


@pytest.mark.parametrize(
    ("error", "status_code"), [(WeightsError("/w/step_3 is cut short"), 409), (InferenceError("/w/step_3 does not fit"), 500)]
)
def test_a_refused_update_gives_the_whole_reason(error: Exception, status_code: int) -> None:
    response = ask("POST", "/update_weights", loader=FakeLoader(error=error), body={"weight_dir": "/w/step_3"})
    assert response.status_code == status_code
    assert response.json()["reason"] == str(error)


@pytest.mark.parametrize("body", [{}, {"weight_dir": "w/step_3"}, {"weight_dir": "/w/step_3", "version": 3}])
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


def test_an_adapter_is_loaded_under_its_name_as_often_as_asked() -> None:
    adapters = FakeAdapters()
    for path in ("/a/1", "/a/2"):
        response = ask("POST", "/load_lora_adapter", adapters=adapters, body={"lora_name": "mine", "lora_path": path})
        assert response.json() == {"status": "ok", "lora_name": "mine", "lora_path": path}
    assert adapters.loaded == [("mine", Path("/a/1")), ("mine", Path("/a/2"))]


def test_no_adapter_is_loaded_while_the_server_sleeps() -> None:
    loader, adapters = FakeLoader(), FakeAdapters()
    loader.is_asleep = True
    body = {"lora_name": "mine", "lora_path": "/a/1"}
    response = ask("POST", "/load_lora_adapter", loader=loader, adapters=adapters, body=body)
    assert (response.status_code, response.json()["reason"]) == (409, "this server is asleep")
    assert adapters.loaded == []


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
