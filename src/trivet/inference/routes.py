"""Adds trivet's routes to vLLM's: which policy is served, which to serve, and whether the engine answers.

Anyone may ask for completions, only who has the run's secret may change the server. Routes that are not listed here require the
secret, because a new version of vLLM may add some. With `server.api_key` vLLM itself requires the key where completions are made,
and accepts the secret as well.
"""

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from trivet.config.layout import SECRET_FILE
from trivet.errors import InferenceError, WeightsError
from trivet.inference.policy_loader import PolicyLoader
from trivet.key_names import key_name
from trivet.wire.versions import PolicyStatus

if TYPE_CHECKING:
    from trivet.inference.api_server import NamedAdapters
    from trivet.inference.versioned_engine import VersionedEngine

HEALTH_TIMEOUT_S = 60.0
"""An engine in the middle of a long prefill, or of loading a policy, answers only when that is done."""


_OPEN = frozenset(
    {"/health", "/ping", "/policy", "/version", "/load", "/metrics", "/tokenize", "/detokenize"}
    | {"/pooling", "/classify", "/score", "/rerank", "/v2/rerank", "/inference/v1/generate"}
)
_OPEN_BELOW_V1 = frozenset(
    {"models", "completions", "chat", "responses", "messages", "embeddings", "score", "rerank", "audio", "realtime"}
)
"""The open routes below `/v1/`."""


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


def make_router(
    loader: PolicyLoader,
    engine: "VersionedEngine",
    *,
    model_name: str,
    adapters: "NamedAdapters | None" = None,
    can_sleep: bool = False,
    health_timeout_s: float = HEALTH_TIMEOUT_S,
) -> APIRouter:
    """Make the routes of one server.

    Args:
        adapters: None where adapters are not served.
        can_sleep: the engine was started with `inference.sleep_while_training`.
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
        )
        return JSONResponse({"status": "ok", "model": model_name, **msgspec.structs.asdict(status)})

    @router.post("/update_weights")
    async def update_weights(body: UpdateWeights) -> Response:
        return await _try(loader.load(body.weight_dir)) or await policy()

    @router.post("/reload_weights")
    async def reload_weights() -> Response:
        return await _try(loader.load_start()) or await policy()

    @router.post("/sleep")
    async def sleep() -> Response:
        if not can_sleep:
            return _refusal(409, f"this server was started without {key_name('inference.sleep_while_training')} = true")
        return await _try(loader.sleep()) or JSONResponse({"status": "ok"})

    @router.post("/load_lora_adapter")
    async def load_lora_adapter(body: LoadLoRAAdapter) -> Response:
        if adapters is None:
            return _refusal(409, f"this server was started without {key_name('inference.enable_lora')} = true")
        if body.lora_name == model_name:
            return _refusal(409, f"{model_name} is the policy's own name; its adapter is loaded with /update_weights")
        loading = loader.while_awake(partial(adapters.load, body.lora_name, path=body.lora_path))
        answer = {"status": "ok", "lora_name": body.lora_name, "lora_path": str(body.lora_path)}
        return await _try(loading) or JSONResponse(answer)

    @router.get("/health")
    async def health() -> Response:
        return await _check_health(engine, timeout_s=health_timeout_s)

    return router


def add_routes(app: FastAPI, router: APIRouter) -> None:
    """Put the routes of `router` into `app`, before those that have the same path."""
    others = list(app.router.routes)
    app.router.routes.clear()
    app.include_router(router)
    app.router.routes.extend(others)


class Gate:
    """ASGI middleware around all routes: refuses requests without the secret, and those of foreign web pages."""

    def __init__(self, app: ASGIApp, *, token: str, host: str) -> None:
        """Guard `app`.

        Args:
            token: the run's secret.
            host: the interface that the server listens on.
        """
        self._app = app
        self._expected = f"Bearer {token}".encode()
        # A web page can resolve its own name to this address (DNS rebinding); the browser then treats this server as the page's.
        self._hosts = {"localhost", "127.0.0.1", "::1", host.lower()} if _is_loopback(host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a refusal."""
        refused = self._refuse(scope) if scope["type"] in ("http", "websocket") else None
        await (refused or self._app)(scope, receive, send)

    def _refuse(self, scope: Scope) -> JSONResponse | None:
        headers, name = Headers(scope=scope), ""
        with suppress(ValueError):  # else the header is no address
            name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        if self._hosts is not None and name not in self._hosts:
            return _refusal(
                403, f"the Host header says {name[:100]!r}; this server answers to {', '.join(sorted(self._hosts))}"
            )
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in _OPEN or (path.startswith("/v1/") and path.split("/")[2] in _OPEN_BELOW_V1):
            return None
        if hmac.compare_digest(headers.get("authorization", "").encode(), self._expected):
            return None
        return _refusal(
            401,
            "this route needs the run's secret as its bearer token: it is in .secret of the server's output_dir; name that "
            f"file with {SECRET_FILE}",
        )


def guard(app: FastAPI, *, token: str, host: str) -> None:
    """Put the gate around `app`. vLLM may have built its middleware stack already: then none can be added the usual way."""
    app.middleware_stack = Gate(app.middleware_stack or app.build_middleware_stack(), token=token, host=host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _check_health(engine: "VersionedEngine", *, timeout_s: float) -> Response:
    try:
        async with asyncio.timeout(timeout_s):
            await engine.ping()
    except TimeoutError:
        return _refusal(503, f"the engine did not answer within {timeout_s:.0f} s")
    except Exception as exc:  # noqa: BLE001  whatever keeps the engine from answering makes this server unhealthy
        return _refusal(503, f"the engine failed: {type(exc).__name__}: {exc}")
    return Response(status_code=200)


async def _try(change: Awaitable[object]) -> JSONResponse | None:
    """Return the refusal of a change that failed. vLLM's exception handlers would remove paths from it, which the caller needs."""
    try:
        await change
    except WeightsError as exc:
        return _refusal(409, str(exc))
    except InferenceError as exc:
        return _refusal(500, str(exc))
    return None


def _refusal(status_code: int, reason: str) -> JSONResponse:
    return JSONResponse({"status": "error", "reason": reason}, status_code=status_code)
