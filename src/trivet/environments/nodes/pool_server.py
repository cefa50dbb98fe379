"""Runs the groups that the orchestrator, on another node, gives to the pool of this one.

It connects to the orchestrator (`nodes.node_pools`), and connects again whenever the line was cut, or to another node when the
orchestrator was started there because its own was lost. What a session left is cancelled when the orchestrator begins another: it
runs those groups elsewhere. Answers that a cut swallowed show in the next beat. A node that drains says so in its beats. The
orchestrator ends the session once it has every answer, so no group is lost or run twice.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio

from trivet.config.schema.environment import EnvNodesConfig
from trivet.environments.nodes.connection import KEY_PURPOSE, open_socket
from trivet.environments.port import EnvironmentPool
from trivet.environments.workers.channel import MAX_MESSAGE_BYTES
from trivet.errors import MessageRefused, RolloutFailed, WorkerLost
from trivet.process.sockets import connect_encrypted, in_frames
from trivet.secret import RunSecret
from trivet.wire.codec import decode, encode
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.worker_nodes import EndSession, FromNode, NodeBeat, StartSession, ToNode
from trivet.wire.workers import AskExample, CallAnswer, CallFailed, Cancel, ExampleFound, GroupDone, RunGroupOrder

logger = logging.getLogger(__name__)

_BEAT_INTERVAL_S = 1.0
_FOLLOW_INTERVAL_S = 5.0
"""How often the configuration is read for the address of the orchestrator."""
_LEAVE_TIMEOUT_S = 5.0
"""Longest time for the orchestrator to take note that a node has given up the calls which it could not finish in time."""


class PoolServer:
    """Serves a pool, whose environments are loaded, to the orchestrator.

    >>> async with open_worker_pool(settings, log_of=log_of, limits=limits) as pool:
    ...     await PoolServer(pool, config, secret=secret, read_config=read_config).run()
    """

    def __init__(
        self, pool: EnvironmentPool, config: EnvNodesConfig, *, secret: RunSecret, read_config: Callable[[], EnvNodesConfig]
    ) -> None:
        """Connect, without waiting for the orchestrator.

        Args:
            read_config: returns the newest configuration, with the address of the orchestrator. It may hang or raise OSError.
        """
        self._pool = pool
        self._config = config
        self._instance = time.time_ns()
        self._session = ""
        self._session_over = asyncio.Event()
        """Set while there is no session."""
        self._session_over.set()
        self._drain_requested = asyncio.Event()
        self._newest_call = -1
        self._running: dict[int, asyncio.Task[None]] = {}
        self._events: list[Any] = []
        """The events `EnvLoad` and `EnvRestart` since the last beat."""
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._context = zmq.asyncio.Context()
        self._socket = open_socket(self._context, zmq.DEALER)
        self._key = secret.derive(KEY_PURPOSE)
        self._read_config = read_config
        self._address = connect_encrypted(self._socket, host=config.host, port=config.port, key=self._key)

    async def run(self) -> None:
        """Serve until `drain` was called and the calls have ended, or until cancelled.

        Raises:
            RoleFailed: a worker ended too often.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = [
                    tasks.create_task(self._pool.run(), name="run-workers"),
                    tasks.create_task(self._beat(), name="beat"),
                    tasks.create_task(self._send(), name="send-answers"),
                    tasks.create_task(self._listen(tasks), name="take-orders"),
                    tasks.create_task(self._follow(), name="follow-orchestrator"),
                ]
                await self._drain_requested.wait()
                await self._finish_session()
                for task in serving:
                    task.cancel()
        finally:
            self._context.destroy(linger=0)

    def drain(self) -> bool:
        """Have `run` finish the calls within `drain_timeout_s` and return. Return False if that was asked for already."""
        was_asked = self._drain_requested.is_set()
        self._drain_requested.set()
        return not was_asked

    async def _finish_session(self) -> None:
        """Wait until the orchestrator has every answer. Give up the calls that do not end in time: they are run elsewhere."""
        for timeout_s in (self._config.drain_timeout_s, _LEAVE_TIMEOUT_S):
            self._post_beat()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._session_over.wait()
                    return
            self._cancel_calls()

    async def _follow(self) -> None:
        """Connect to the orchestrator wherever the launcher has started it last."""
        newest = self._config
        while True:
            await asyncio.sleep(_FOLLOW_INTERVAL_S)
            before = newest
            with suppress(OSError):  # the shared directory does not answer now
                newest = await asyncio.to_thread(self._read_config)
            if (newest.host, newest.port) != (before.host, before.port):
                logger.info("the orchestrator is at %s:%d now", newest.host, newest.port)
                self._socket.disconnect(self._address)
                self._address = connect_encrypted(self._socket, host=newest.host, port=newest.port, key=self._key)

    async def _listen(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                self._receive(decode(b"".join(frames), ToNode), tasks)
            except MessageRefused as exc:
                logger.warning("an order of the orchestrator was refused: %s", exc)

    def _receive(self, message: ToNode, tasks: asyncio.TaskGroup) -> None:
        if message.session != self._session and not isinstance(message.body, EndSession):
            self._start_session(message.session)
        match message.body:
            case RunGroupOrder() | AskExample() as asked:
                running, call_id = self._running, asked.call_id
                self._newest_call = call_id
                running[call_id] = tasks.create_task(self._answer(asked, message.session), name=f"call-{call_id}")
                running[call_id].add_done_callback(lambda _: running.pop(call_id))
            case Cancel(call_id=call_id):
                if (task := self._running.get(call_id)) is not None:
                    task.cancel()
            case StartSession():
                self._post_beat(dict(self._pool.infos))
            case EndSession():
                if message.session == self._session:
                    self._start_session("")

    def _start_session(self, session: str) -> None:
        """Cancel the calls of the session before. An empty `session` is none."""
        self._cancel_calls()
        self._session, self._newest_call = session, -1
        (self._session_over.clear if session else self._session_over.set)()
        self._events.clear()
        self._pool.report_to(self._events.append)

    def _cancel_calls(self) -> None:
        """Cancel the calls that run, and count them no more."""
        for task in self._running.values():
            task.cancel()
        self._running = {}

    async def _answer(self, asked: RunGroupOrder | AskExample, session: str) -> None:
        call_id = asked.call_id
        try:
            if isinstance(asked, AskExample):
                example = await self._pool.example(asked.env, split=asked.split, example_id=asked.example_id)
                self._post(ExampleFound(call_id=call_id, example=example), session)
            else:
                self._post(GroupDone(call_id=call_id, rollouts=await self._pool.run_group(asked.request)), session)
        except RolloutFailed as exc:
            failure = CallFailed(call_id=call_id, kind=exc.kind, message=str(exc), is_infrastructure=exc.is_infrastructure)
            self._post(failure, session)
        except Exception as exc:  # it must not end the groups of the other calls
            if not isinstance(exc, WorkerLost | MessageRefused):
                logger.exception("call %d failed", call_id)
            kind, is_lost = type(exc).__name__, isinstance(exc, WorkerLost)
            self._post(CallFailed(call_id=call_id, kind=kind, message=str(exc), is_lost=is_lost), session)

    async def _beat(self) -> None:
        while True:
            self._post_beat()
            await asyncio.sleep(_BEAT_INTERVAL_S)

    def _post_beat(self, infos: dict[str, EnvironmentInfo] | None = None) -> None:
        beat = NodeBeat(
            newest_call=self._newest_call,
            running=list(self._running),
            is_draining=self._drain_requested.is_set(),
            infos=infos,
            workers=list(self._pool.status()),
            metrics=dict(self._pool.metrics()),
            events=self._events.copy(),
        )
        self._events.clear()
        self._post(beat, self._session)

    async def _send(self) -> None:
        while True:
            await self._socket.send_multipart(in_frames(await self._outgoing.get()))

    def _post(self, body: NodeBeat | CallAnswer, session: str) -> None:
        data = encode(FromNode(node=self._config.own, instance=self._instance, session=session, body=body))
        if len(data) > MAX_MESSAGE_BYTES:
            raise MessageRefused(f"a message of {len(data) / 2**20:.0f} MiB is larger than what fits between nodes")
        self._outgoing.put_nowait(data)
