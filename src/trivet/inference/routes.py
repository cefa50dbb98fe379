"""Routes of ours beside vLLM's: which policy is served, which to serve from now on, and whether the engine answers."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated, Protocol

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict

from trivet.errors import InferenceError, WeightsError
from trivet.inference.policy_loader import PolicyLoader
from trivet.weights.manifest import Manifest

HEALTH_TIMEOUT_S = 60.0
"""An engine in the middle of a long prefill, or of loading a policy, answers when that is done."""


class Pinged(Protocol):
    """What a health check needs of the engine. Adapter: `versioned_engine.VersionedEngine`."""

    async def ping(self) -> None: ...


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} is relative: the server may run in another directory; send the absolute path")
    return path


class UpdateWeights(BaseModel):
    model_config = ConfigDict(extra="forbid")
    weight_dir: Annotated[Path, AfterValidator(_absolute)]
    """A published `weights/step_N`, as the server sees it."""


class Loaded(BaseModel):
    status: str = "ok"
    version: int
    digest: str


class Policy(BaseModel):
    model: str
    version: int
    digest: str


def make_router(
    loader: PolicyLoader, engine: Pinged, *, model_name: str, health_timeout_s: float = HEALTH_TIMEOUT_S
) -> APIRouter:
    router = APIRouter()

    @router.post("/update_weights", response_model=Loaded)
    async def update_weights(body: UpdateWeights) -> Loaded | Response:
        return await _answer(loader.load(body.weight_dir))

    @router.post("/reload_weights", response_model=Loaded)
    async def reload_weights() -> Loaded | Response:
        return await _answer(loader.load_start())

    @router.get("/policy")
    async def policy() -> Policy:
        return Policy(model=model_name, version=loader.policy.version, digest=loader.policy.digest)

    @router.get("/health")
    async def health() -> Response:
        try:
            async with asyncio.timeout(health_timeout_s):
                await engine.ping()
        except TimeoutError:
            return _refusal(503, f"the engine did not answer within {health_timeout_s:.0f} s")
        except Exception as exc:  # noqa: BLE001  whatever keeps the engine from answering makes this server unhealthy
            return _refusal(503, f"the engine failed: {type(exc).__name__}: {exc}")
        return Response(status_code=200)

    return router


def add_routes(app: FastAPI, router: APIRouter) -> None:
    """Put the routes of `router` into `app`, before those that have the same path."""
    theirs = list(app.router.routes)
    app.router.routes.clear()
    app.include_router(router)
    app.router.routes.extend(theirs)


async def _answer(loading: Awaitable[Manifest]) -> Loaded | Response:
    # vLLM's handlers of exceptions take paths out of messages; the path is what the caller needs.
    try:
        manifest = await loading
    except WeightsError as exc:
        return _refusal(409, str(exc))
    except InferenceError as exc:
        return _refusal(500, str(exc))
    return Loaded(version=manifest.version, digest=manifest.digest)


def _refusal(status_code: int, reason: str) -> JSONResponse:
    return JSONResponse({"status": "error", "reason": reason}, status_code=status_code)
