"""Serves the sessions of agents on one port: each has a base URL and a key of its own.

A client that is given the base URL and the key, by the usual variables, needs nothing else. It listens on loopback unless the user
asks for another address. Bodies and connections are bounded, and keys are compared in constant time.
"""

import asyncio
import hmac
import json
import logging
import math
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from trivet.config.tables import as_table
from trivet.environments.apis.agents.formats import FORMATS, ChatFormat, Format, ModelRequest
from trivet.environments.apis.agents.session import AgentSession, LimitReached, RecordedTurn
from trivet.errors import RolloutFailed

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 * 2**20
"""A conversation that fills a context of a million tokens has a few MiB."""
_MAX_CONNECTIONS = 4096
_KEEP_ALIVE_S = 3600
"""An agent works between two requests. A connection that was closed meanwhile would fail its next one."""
_RETRY_HEADER = "x-stainless-retry-count"
"""Header with which the clients of OpenAI and Anthropic say how often they have sent a request before."""


class AgentServer:
    """The sessions that are served.

    >>> async with serve_agents("127.0.0.1") as server:
    ...     base_url = server.open(session)
    ...     server.close(session)
    """

    def __init__(self, root: str, *, model: str) -> None:
        """Serve no session yet.

        Args:
            root: the address of the server.
            model: the name of the model for clients that list models.
        """
        self.root = root
        self._model = model
        self._sessions: dict[str, AgentSession] = {}
        """The sessions by the public part of their addresses."""
        self._num_opened = 0

    def open(self, session: AgentSession) -> str:
        """Serve a session; return its base URL, without `/v1`."""
        name, self._num_opened = str(self._num_opened), self._num_opened + 1
        self._sessions[name] = session
        return f"{self.root}/{name}"

    def close(self, session: AgentSession) -> None:
        """Serve a session no more. May be called again."""
        self._sessions = {name: other for name, other in self._sessions.items() if other is not session}

    def routes(self) -> list[Route]:
        """Return the routes of every session."""
        asked = [Route(f"/{{session}}/v1{form.path}", partial(self._answer, form=form), methods=["POST"]) for form in FORMATS]
        return [
            *asked,
            Route("/{session}/v1/models", self._list_models),
            Route("/{session}/reward", self._take_reward, methods=["POST"]),
        ]

    def _find(self, request: Request) -> AgentSession | None:
        """Return the session of a request that has its key."""
        session = self._sessions.get(request.path_params["session"])
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        is_allowed = session is not None and hmac.compare_digest(given.encode(), session.key.encode())
        return session if is_allowed else None

    async def _answer(self, request: Request, *, form: Format) -> Response:
        session = self._find(request)
        if session is None:
            return JSONResponse(form.error("no session has this address and key", kind="authentication_error"), 401)
        try:
            asked = form.read(await _read_json(request))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:  # a body of another shape
            message = f"the request cannot be read: {type(exc).__name__}: {exc}"
            return JSONResponse(form.error(message, kind="invalid_request_error"), 400)
        try:
            reply, recorded = await _unless_disconnected(
                request, session.ask(asked, is_retry=request.headers.get(_RETRY_HEADER, "0") != "0")
            )
        except ClientDisconnect:
            return Response(status_code=499)
        except LimitReached as exc:
            return JSONResponse(form.error(str(exc), kind="invalid_request_error"), 400)
        except RolloutFailed as exc:
            status = 503 if exc.is_infrastructure else 400
            return JSONResponse(form.error(str(exc), kind="api_error"), status)
        answer = form.write(reply)
        if asked.is_streamed:
            parts = _deliver([event.encode() for event in form.events(answer)], request, session, asked, recorded)
            return StreamingResponse(parts, media_type="text/event-stream")
        content = json.dumps(answer).encode()
        headers = {"content-length": str(len(content))}
        parts = _deliver([content], request, session, asked, recorded)
        return StreamingResponse(parts, media_type="application/json", headers=headers)

    async def _list_models(self, request: Request) -> Response:
        if self._find(request) is None:
            return JSONResponse(ChatFormat().error("no session has this address and key", kind="authentication_error"), 401)
        return JSONResponse(
            {"object": "list", "data": [{"id": self._model, "object": "model", "created": 0, "owned_by": "trivet"}]}
        )

    async def _take_reward(self, request: Request) -> Response:
        """Take `{"reward": number, "scores": {name: number}}`, or a number alone."""
        session = self._find(request)
        if session is None:
            return JSONResponse(ChatFormat().error("no session has this address and key", kind="authentication_error"), 401)
        try:
            session.report(*read_reward(await _read_json(request)))
        except ValueError as exc:
            return JSONResponse(ChatFormat().error(str(exc), kind="invalid_request_error"), 400)
        return JSONResponse({"status": "ok"})


def read_reward(value: object) -> tuple[float, dict[str, float]]:
    """Return the reward and the scores that an agent reports. Raises ValueError when it is no finite number."""
    table: dict[str, Any] = as_table(value) or {"reward": value}
    scores: dict[str, Any] = table.get("scores") or {}
    numbers = {"reward": table.get("reward"), **scores}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f'{name} must be a finite number, got {number!r}: send {{"reward": 0.5}}')
    return float(numbers.pop("reward")), {name: float(number) for name, number in numbers.items()}


async def _read_json(request: Request) -> Any:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MAX_BODY_BYTES:
            raise ValueError(f"the body has more than {_MAX_BODY_BYTES // 2**20} MiB")
    return json.loads(bytes(data))


async def _unless_disconnected(request: Request, asking: Any) -> Any:
    """Wait for an answer. Raises ClientDisconnect if the client goes away before."""
    answer = asyncio.ensure_future(asking)
    try:
        while not answer.done():
            await asyncio.wait([answer], timeout=0.5)
            if not answer.done() and await request.is_disconnected():
                raise ClientDisconnect
        return answer.result()
    finally:
        if not answer.done():
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)


async def _deliver(
    parts: list[bytes], request: Request, session: AgentSession, asked: ModelRequest, recorded: RecordedTurn
) -> AsyncIterator[bytes]:
    """Yield the parts of an answer, and note whether the client was still there after the last one."""
    is_whole = recorded.is_delivered
    try:
        for part in parts:
            yield part
        is_whole = is_whole or not await request.is_disconnected()
    finally:
        recorded.is_delivered = is_whole
        if not is_whole:
            session.note_abandoned(asked)


@asynccontextmanager
async def serve_agents(host: str, *, model: str, port: int = 0, routes: Sequence[Route] = ()) -> AsyncIterator[AgentServer]:
    """Serve on an address for a block.

    Args:
        port: 0 for a free one.
        routes: further routes.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    server = AgentServer(f"http://{shown}:{sock.getsockname()[1]}", model=model)
    app = Starlette(routes=[*routes, *server.routes()])
    config = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="off",
        limit_concurrency=_MAX_CONNECTIONS,
        backlog=_MAX_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    http = uvicorn.Server(config)
    config.load()
    http.lifespan = config.lifespan_class(config)
    await http.startup(sockets=[sock])
    serving = asyncio.create_task(http.main_loop(), name="agent-server")
    try:
        yield server
    finally:
        http.should_exit = True
        await serving
        await http.shutdown(sockets=[sock])
        sock.close()
