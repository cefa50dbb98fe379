"""Serves the sessions of agents on one port: each has a base URL and a key of its own.

A client that is given the base URL and the key, by the usual variables, needs nothing else. It listens on loopback unless the user
asks for another address. Bodies and connections are bounded, and keys are compared in constant time.
"""

import asyncio
import hmac
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from trivet.config.tables import as_table
from trivet.environments.apis.agents.formats import FORMATS, Format
from trivet.environments.apis.agents.session import AgentSession, ModelCall
from trivet.errors import RolloutFailed
from trivet.wire.rollouts import MAX_REWARD

_MAX_BODY_BYTES = 64 * 2**20
"""A conversation that fills a context of a million tokens has a few MiB."""
_MAX_CONNECTIONS = 4096
_KEEP_ALIVE_S = 3600
"""An agent works between two requests. A connection that was closed meanwhile would fail its next one."""
_STOP_TIMEOUT_S = 5
"""Longest wait for open requests at the end."""
_RETRY_HEADER = "x-stainless-retry-count"
"""Header with which the clients of OpenAI and Anthropic say how often they have sent a request before."""
_ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
ReadT = TypeVar("ReadT")


class AgentServer:
    """The sessions that are served.

    >>> server = AgentServer("127.0.0.1", model="m")
    >>> async with server.listening(), server.serving(session) as base_url:
    ...     ...
    """

    def __init__(self, host: str, port: int = 0, *, model: str) -> None:
        """Reserve an address.

        Args:
            port: 0 for a free one.
            model: the name of the model for clients that list models.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_MAX_CONNECTIONS)
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        self.root = f"http://{shown}:{self._socket.getsockname()[1]}"
        self._model = model
        self._sessions: dict[str, AgentSession] = {}
        """The open sessions by their names."""

    @asynccontextmanager
    async def listening(self, routes: Sequence[Route] = ()) -> AsyncIterator[None]:
        """Answer requests during the block, also those of further routes."""
        own = [Route(f"/{{session}}/v1{form.path}", partial(self._answer, form=form), methods=["POST"]) for form in FORMATS]
        own.append(Route("/{session}/v1/models", self._list_models))
        own.append(Route("/{session}/reward", self._take_reward, methods=["POST"]))
        app = Starlette(routes=[*routes, *own], exception_handlers={HTTPException: _refuse, ClientDisconnect: _end_unheard})
        config = uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
        )
        http = uvicorn.Server(config)
        config.load()
        http.lifespan = config.lifespan_class(config)
        await http.startup(sockets=[self._socket])  # not `serve`, which takes the signals of the process
        answering = asyncio.create_task(http.main_loop(), name="agent-server")
        try:
            yield
        finally:
            for session in list(self._sessions.values()):
                await session.aclose()  # a request that waits for the model would hold up the end
            http.should_exit = True
            await answering
            await http.shutdown(sockets=[self._socket])
            self._socket.close()

    def address(self, session: AgentSession) -> str:
        """Return the base URL of a session, without `/v1`."""
        return f"{self.root}/{session.name}"

    @asynccontextmanager
    async def serving(self, session: AgentSession) -> AsyncIterator[str]:
        """Serve a session during the block, and cancel its requests at the end. Yields its address."""
        self._sessions[session.name] = session
        try:
            yield self.address(session)
        finally:
            del self._sessions[session.name]
            await session.aclose()

    def _find(self, request: Request) -> AgentSession:
        """Return the session of a request that has its key. Raises HTTPException without it."""
        session = self._sessions.get(request.path_params["session"])
        if session is None or not has_key(request, session.key):
            raise HTTPException(401, "no open session has this address and key")
        return session

    async def _answer(self, request: Request, *, form: Format) -> Response:
        session = self._find(request)
        model_request = await _read(request, form.read)
        pending_call = session.ask(model_request, is_retry=request.headers.get(_RETRY_HEADER, "0") != "0")
        try:
            call = await _unless_disconnected(request, pending_call)
        except RolloutFailed as exc:
            raise HTTPException(503 if exc.is_infrastructure else 400, str(exc)) from exc
        answer = form.write(call.answer.result().reply)
        if model_request.is_streamed:
            parts = [event.encode() for event in form.events(answer)]
            return StreamingResponse(_deliver(parts, request, call), media_type="text/event-stream")
        content = json.dumps(answer).encode()
        headers = {"content-length": str(len(content))}
        return StreamingResponse(_deliver([content], request, call), media_type="application/json", headers=headers)

    async def _list_models(self, request: Request) -> Response:
        self._find(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "trivet"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _take_reward(self, request: Request) -> Response:
        session = self._find(request)
        reward, scores = await _read(request, read_reward)
        try:
            session.report(reward, scores)
        except RolloutFailed as exc:
            raise HTTPException(400, str(exc)) from exc
        return JSONResponse({"status": "ok"})


def has_key(request: Request, key: str) -> bool:
    """Return whether a request has a key, as the clients of OpenAI or Anthropic send it."""
    given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(given.encode(), key.encode())


def read_reward(value: object) -> tuple[float, dict[str, float]]:
    """Return the reward and the scores that an agent reports, as `{"reward": number, "scores": {name: number}}` or a number alone.

    Raises:
        ValueError: one of them is no number, or it is infinite or too large.
    """
    table = as_table(value) or {"reward": value}
    scores = as_table(table.get("scores") or {})
    if scores is None:
        raise ValueError('scores must be a table of numbers: send {"reward": 0.5, "scores": {"length": 3}}')
    return _number("reward", table.get("reward")), {name: _number(name, score) for name, score in scores.items()}


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_REWARD <= value <= MAX_REWARD:
        raise ValueError(f'{name} must be a number of at most {MAX_REWARD:g}, got {value!r:.100}: send {{"reward": 0.5}}')
    return float(value)


async def _read(request: Request, read: Callable[[Any], ReadT]) -> ReadT:
    """Return what `read` makes of a request's body. Raises HTTPException for a body that it cannot read."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MAX_BODY_BYTES:
            raise HTTPException(400, f"the body has more than {_MAX_BODY_BYTES // 2**20} MiB")
    try:
        return read(msgspec.json.decode(bytes(data)))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as exc:  # a body of another shape
        raise HTTPException(400, f"the request cannot be read: {type(exc).__name__}: {exc}") from exc


def _refuse(_: Request, error: Exception) -> Response:
    """Return an error in a form that the clients of OpenAI and Anthropic read."""
    assert isinstance(error, HTTPException)
    kind = _ERROR_TYPES.get(error.status_code, "api_error")
    content = {"type": "error", "error": {"type": kind, "message": error.detail, "param": None, "code": kind}}
    return JSONResponse(content, error.status_code)


def _end_unheard(_: Request, __: Exception) -> Response:
    """Return an answer that nobody gets."""
    return Response(status_code=499)


async def _unless_disconnected(request: Request, pending_call: Coroutine[Any, Any, ModelCall]) -> ModelCall:
    """Wait for an answer. Raises ClientDisconnect if the client goes away before."""
    answer = asyncio.ensure_future(pending_call)
    disconnected = asyncio.ensure_future(request.receive())  # the body was read: what comes next is the end of the connection
    try:
        await asyncio.wait([answer, disconnected], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        disconnected.cancel()
        await asyncio.gather(answer, disconnected, return_exceptions=True)


async def _deliver(parts: Sequence[bytes], request: Request, call: ModelCall) -> AsyncIterator[bytes]:
    """Yield the parts of an answer, and note whether the client was still there after the last one."""
    recorded = call.answer.result()
    is_whole = recorded.is_delivered
    try:
        for part in parts:
            yield part
        is_whole = is_whole or not await request.is_disconnected()
    finally:
        recorded.is_delivered, call.is_abandoned = is_whole, not is_whole
