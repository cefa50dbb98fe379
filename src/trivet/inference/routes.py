"""Adds trivet's routes to vLLM's: which policy is served, which to serve, and whether the engine answers."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated, Protocol, TypedDict

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trivet.errors import InferenceError, WeightsError
from trivet.inference.policy_loader import PolicyLoader
from trivet.key_names import key_name
from trivet.weights.manifest import Manifest

HEALTH_TIMEOUT_S = 60.0
"""An engine in the middle of a long prefill, or of loading a policy, answers only when that is done."""


class PingableEngine(Protocol):
    """The part of the engine that a health check uses. Adapter: `versioned_engine.VersionedEngine`."""

    async def ping(self) -> None:
        """Return once every worker has answered."""
        ...


class AdapterLoader(Protocol):
    """Serves adapters under names of their own. Adapter: `named_adapters.NamedAdapters`."""

    async def load(self, name: str, *, path: Path) -> None:
        """Serve the adapter in the directory `path` as `name`.

        Raises:
            WeightsError: it cannot be served; an adapter that was loaded under `name` before stays.
        """
        ...


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} is relative: the server may run in another directory; send the absolute path")
    return path


class UpdateWeights(BaseModel):
    """Serve the policy in a directory."""

    model_config = ConfigDict(extra="forbid")
    weight_dir: Annotated[Path, AfterValidator(_absolute)]
    """A published `weights/step_N`, as the server sees it."""


class LoadLoRAAdapter(BaseModel):
    """Serve an adapter under a name of its own."""

    model_config = ConfigDict(extra="forbid")
    lora_name: Annotated[str, Field(min_length=1)]
    """The `model` of requests that the adapter is to answer."""
    lora_path: Annotated[Path, AfterValidator(_absolute)]
    """The adapter's directory in PEFT's format, as the server sees it."""


class LoadedAdapter(BaseModel):
    """An adapter that is served."""

    status: str = "ok"
    lora_name: str
    lora_path: Path


class PolicyLoadedBody(BaseModel):
    """The policy that a load ended with."""

    status: str = "ok"
    version: int
    digest: str
    probe_mismatch: float | None
    """Mean difference, in nats, of the engine's log-probabilities of the policy's probe; null for a policy without one."""
    probe_limit: float | None
    dtype: str
    """The dtype that the engine computes in, by torch's name."""


class ServedPolicyBody(BaseModel):
    """The policy that is served."""

    model: str
    version: int
    digest: str
    probe_mismatch: float | None
    probe_limit: float | None
    dtype: str
    asleep: bool
    """True while the server answers no request. Its next load ends that."""


class AsleepBody(BaseModel):
    """The engine has freed its GPU memory."""

    status: str = "ok"


def make_router(
    loader: PolicyLoader,
    engine: PingableEngine,
    *,
    model_name: str,
    adapters: AdapterLoader | None = None,
    can_sleep: bool = False,
    health_timeout_s: float = HEALTH_TIMEOUT_S,
) -> APIRouter:
    """Make the routes of one server.

    Args:
        adapters: None where adapters are not served.
        can_sleep: the engine was started with `inference.sleep_while_training`.
    """
    router = APIRouter()
    _add_policy_routes(router, loader, model_name=model_name, can_sleep=can_sleep)

    @router.post("/load_lora_adapter", response_model=LoadedAdapter)
    async def load_lora_adapter(body: LoadLoRAAdapter) -> LoadedAdapter | Response:
        if adapters is None:
            return _refusal(409, f"this server was started without {key_name('inference.enable_lora')} = true")
        if body.lora_name == model_name:
            return _refusal(409, f"{model_name} is the policy's own name; its adapter is loaded with /update_weights")
        try:
            async with loader.keep_awake():
                await adapters.load(body.lora_name, path=body.lora_path)
        except WeightsError as exc:
            return _refusal(409, str(exc))
        except InferenceError as exc:
            return _refusal(500, str(exc))
        return LoadedAdapter(lora_name=body.lora_name, lora_path=body.lora_path)

    @router.get("/health")
    async def health() -> Response:
        return await _check_health(engine, timeout_s=health_timeout_s)

    return router


def _add_policy_routes(router: APIRouter, loader: PolicyLoader, *, model_name: str, can_sleep: bool) -> None:
    @router.post("/update_weights", response_model=PolicyLoadedBody)
    async def update_weights(body: UpdateWeights) -> PolicyLoadedBody | Response:
        return await _answer(loader, loader.load(body.weight_dir))

    @router.post("/reload_weights", response_model=PolicyLoadedBody)
    async def reload_weights() -> PolicyLoadedBody | Response:
        return await _answer(loader, loader.load_start())

    @router.post("/sleep", response_model=AsleepBody)
    async def sleep() -> AsleepBody | Response:
        if not can_sleep:
            return _refusal(409, f"this server was started without {key_name('inference.sleep_while_training')} = true")
        try:
            await loader.sleep()
        except InferenceError as exc:
            return _refusal(500, str(exc))
        return AsleepBody()

    @router.get("/policy")
    async def policy() -> ServedPolicyBody:
        served = loader.policy
        return ServedPolicyBody(
            model=model_name,
            version=served.version,
            digest=served.digest,
            asleep=loader.is_asleep,
            **_probe_fields(loader),
        )


def add_routes(app: FastAPI, router: APIRouter) -> None:
    """Put the routes of `router` into `app`, before those that have the same path."""
    theirs = list(app.router.routes)
    app.router.routes.clear()
    app.include_router(router)
    app.router.routes.extend(theirs)


async def _check_health(engine: PingableEngine, *, timeout_s: float) -> Response:
    try:
        async with asyncio.timeout(timeout_s):
            await engine.ping()
    except TimeoutError:
        return _refusal(503, f"the engine did not answer within {timeout_s:.0f} s")
    except Exception as exc:  # noqa: BLE001  whatever keeps the engine from answering makes this server unhealthy
        return _refusal(503, f"the engine failed: {type(exc).__name__}: {exc}")
    return Response(status_code=200)


async def _answer(loader: PolicyLoader, loading: Awaitable[Manifest]) -> PolicyLoadedBody | Response:
    # vLLM's exception handlers remove paths from messages, and the caller needs the path.
    try:
        manifest = await loading
    except WeightsError as exc:
        return _refusal(409, str(exc))
    except InferenceError as exc:
        return _refusal(500, str(exc))
    return PolicyLoadedBody(version=manifest.version, digest=manifest.digest, **_probe_fields(loader))


class _ProbeFields(TypedDict):
    probe_mismatch: float | None
    probe_limit: float | None
    dtype: str


def _probe_fields(loader: PolicyLoader) -> _ProbeFields:
    result = loader.probe_result
    return {
        "probe_mismatch": result.mismatch if result else None,
        "probe_limit": result.limit if result else None,
        "dtype": loader.dtype,
    }


def _refusal(status_code: int, reason: str) -> JSONResponse:
    return JSONResponse({"status": "error", "reason": reason}, status_code=status_code)
