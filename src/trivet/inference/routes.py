"""Adds trivet's HTTP routes to vLLM's: they report the served policy, load another policy, and check whether the engine answers.

Anyone may request completions; only a client with the run's secret may change the server. So every route that is not listed as open
here requires the secret, also routes that a new version of vLLM may add. With `server.api_key` vLLM itself requires that key for
completions, and accepts the secret as well.
"""

import asyncio
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from trivet.config.schema.base import WebAddress
from trivet.errors import TrivetError, WeightsError
from trivet.gate import Gate, refuse
from trivet.inference.fetcher import PolicyFetcher
from trivet.inference.policy_loader import PolicyLoader
from trivet.key_names import key_name
from trivet.wire.versions import FetchablePolicy, PolicyStatus, TransferRound

if TYPE_CHECKING:
    from trivet.inference.api_server import NamedAdapters
    from trivet.inference.versioned_engine import VersionedEngine

HEALTH_TIMEOUT_S = 60.0
"""Longest time for the engine to answer GET /health. During a long prefill or a load of a policy it answers only afterwards."""


_OPEN_PATHS = frozenset(
    {"/health", "/ping", "/policy", "/version", "/load", "/metrics", "/tokenize", "/detokenize"}
    | {"/pooling", "/classify", "/score", "/rerank", "/v2/rerank", "/inference/v1/generate"}
)
_OPEN_BELOW_V1 = frozenset(
    {"models", "completions", "chat", "responses", "messages", "embeddings", "score", "rerank", "audio", "realtime"}
)
"""The second part of the paths below `/v1/` that are open."""


def is_open(path: str) -> bool:
    """Return whether anyone may request `path`."""
    return path in _OPEN_PATHS or (path.startswith("/v1/") and path.split("/")[2] in _OPEN_BELOW_V1)


def _require_absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} is relative: the server may run in another directory; send the absolute path")
    return path


def _read_round(value: object) -> TransferRound | None:
    return None if value is None else msgspec.convert(value, TransferRound)  # its error is a ValueError


class UpdateWeights(BaseModel):
    """The body of POST /update_weights: serve the policy in a directory."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    weight_dir: Annotated[Path, AfterValidator(_require_absolute)]
    """A published `weights/step_N`, as the server sees it."""
    transfer: Annotated[TransferRound | None, BeforeValidator(_read_round)] = None
    """The round in which the trainer sends the policy. If it fails, the files are loaded."""


class FetchWeights(BaseModel):
    """The other body of POST /update_weights: fetch a policy and serve it. The fields are those of `FetchablePolicy`."""

    model_config = ConfigDict(extra="forbid")
    version: Annotated[int, Field(ge=1)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    manifest_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    sources: Annotated[tuple[WebAddress, ...], Field(min_length=1)]


class LoadLoRAAdapter(BaseModel):
    """The body of POST /load_lora_adapter: serve an adapter under a name of its own."""

    model_config = ConfigDict(extra="forbid")
    lora_name: Annotated[str, Field(min_length=1)]
    """The name that requests give as their `model` to be answered by the adapter."""
    lora_path: Annotated[Path, AfterValidator(_require_absolute)]
    """The adapter's directory in PEFT's format, as the server sees it."""


def make_router(
    loader: PolicyLoader,
    engine: "VersionedEngine",
    *,
    model_name: str,
    fetcher: PolicyFetcher,
    adapters: "NamedAdapters | None" = None,
    can_sleep: bool = False,
    transfer_port: int = 0,
    health_timeout_s: float = HEALTH_TIMEOUT_S,
) -> APIRouter:
    """Make trivet's routes of one server.

    Args:
        model_name: the name under which requests get the policy.
        fetcher: fetches policies.
        adapters: loads users' adapters; None for a server without adapters.
        can_sleep: the engine was started with `inference.sleep_while_training`.
        transfer_port: the port of the server's store for transfers; 0: there is none.
    """
    router = APIRouter()

    @router.get("/policy")
    async def policy() -> Response:
        result = loader.probe_result
        status = PolicyStatus(
            version=loader.policy.version,
            digest=loader.policy.digest,
            probe_mismatch=result.mismatch if result else None,
            probe_limit=result.limit if result else None,
            dtype=loader.dtype,
            asleep=loader.is_asleep,
            is_fetching=fetcher.is_fetching,
            source=loader.source,
            num_workers=engine.num_workers,
            transfer_port=transfer_port,
        )
        return JSONResponse({"status": "ok", "model": model_name, **msgspec.structs.asdict(status)})

    @router.post("/update_weights")
    async def update_weights(body: UpdateWeights | FetchWeights) -> Response:
        return await _refusal_of(_load(body, loader, fetcher)) or await policy()

    @router.post("/reload_weights")
    async def reload_weights() -> Response:
        return await _refusal_of(loader.load_start()) or await policy()

    @router.post("/sleep")
    async def sleep() -> Response:
        if not can_sleep:
            return refuse(409, f"this server was started without {key_name('inference.sleep_while_training')} = true")
        return await _refusal_of(loader.sleep()) or JSONResponse({"status": "ok"})

    @router.post("/load_lora_adapter")
    async def load_lora_adapter(body: LoadLoRAAdapter) -> Response:
        if adapters is None:
            return refuse(409, f"this server was started without {key_name('inference.enable_lora')} = true")
        if body.lora_name == model_name:
            return refuse(409, f"{model_name} is the policy's own name; its adapter is loaded with /update_weights")
        loading = loader.while_awake(partial(adapters.load, body.lora_name, path=body.lora_path))
        answer = {"status": "ok", "lora_name": body.lora_name, "lora_path": str(body.lora_path)}
        return await _refusal_of(loading) or JSONResponse(answer)

    @router.get("/health")
    async def health() -> Response:
        return await _check_health(engine, timeout_s=health_timeout_s)

    return router


def add_routes(app: FastAPI, router: APIRouter) -> None:
    """Put the routes of `router` before the routes of `app`. The first route with a path answers, so they replace vLLM's."""
    vllm_routes = list(app.router.routes)
    app.router.routes.clear()
    app.include_router(router)
    app.router.routes.extend(vllm_routes)


def add_gate(app: FastAPI, *, token: str, host: str) -> None:
    """Put a `Gate` around `app`. `app.add_middleware` would fail if vLLM has built the middleware stack already."""
    app.middleware_stack = Gate(app.middleware_stack or app.build_middleware_stack(), token=token, host=host, is_open=is_open)


async def _load(body: UpdateWeights | FetchWeights, loader: PolicyLoader, fetcher: PolicyFetcher) -> None:
    """Serve the policy that a request names, or begin to fetch it."""
    if isinstance(body, UpdateWeights):
        await loader.load(body.weight_dir, body.transfer)
    else:
        await fetcher.load(FetchablePolicy(**body.model_dump()))


async def _check_health(engine: "VersionedEngine", *, timeout_s: float) -> Response:
    """Return status 200 once every worker of the engine answers, else a refusal."""
    try:
        async with asyncio.timeout(timeout_s):
            await engine.ping()
    except TimeoutError:
        return refuse(503, f"the engine did not answer within {timeout_s:.0f} s")
    except Exception as exc:  # noqa: BLE001  the engine may raise anything, and each error makes this server unhealthy
        return refuse(503, f"the engine failed: {type(exc).__name__}: {exc}")
    return Response(status_code=200)


async def _refusal_of(change: Awaitable[object]) -> JSONResponse | None:
    """Await `change`; return None when it succeeded, else an answer with the error.

    vLLM's exception handlers are not used, because they remove paths from an error, and the caller needs these.
    """
    try:
        await change
    except WeightsError as exc:
        return refuse(409, str(exc))
    except TrivetError as exc:
        return refuse(500, str(exc))
    return None
