"""Runs the groups that the orchestrator, on another node, gives to the pool of this one.

It connects to the orchestrator (`nodes.node_pools`), and connects again whenever the line was cut. What a session left is cancelled
when the orchestrator begins another: it runs those groups elsewhere. Answers that a cut swallowed show in the next beat.
"""

import asyncio
import logging
import secrets

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
from trivet.wire.events import EnvLoad, EnvRestart, Event
from trivet.wire.worker_nodes import AskNodePrompt, CallLost, FromNode, NodeAnswer, NodeBeat, PoolLoaded, StartSession, ToNode
from trivet.wire.workers import CallFailed, Cancel, GroupDone, PromptFound, RunGroupOrder

logger = logging.getLogger(__name__)

_BEAT_INTERVAL_S = 1.0


class PoolServer:
    """Serves a pool, whose environments are loaded, to the orchestrator.

    >>> async with open_worker_pool(settings, log_of=log_of, limits=limits) as pool:
    ...     await PoolServer(pool, config, secret=secret).run()
    """

    def __init__(self, pool: EnvironmentPool, config: EnvNodesConfig, *, secret: RunSecret) -> None:
        """Connect, without waiting for the orchestrator."""
        self._pool = pool
        self._node = config.own
        self._instance = secrets.token_hex(8)
        self._session = ""
        self._newest_call = -1
        self._running: dict[int, asyncio.Task[None]] = {}
        self._events: list[EnvLoad | EnvRestart] = []
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._context = zmq.asyncio.Context()
        self._socket = open_socket(self._context, zmq.DEALER)
        connect_encrypted(self._socket, host=config.host, port=config.port, key=secret.derive(KEY_PURPOSE))

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            RoleFailed: a worker ended too often.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pool.run(), name="run-workers")
                tasks.create_task(self._beat(), name="beat")
                tasks.create_task(self._send(), name="send-answers")
                while True:
                    self._receive(b"".join(await self._socket.recv_multipart()), tasks)
        finally:
            self._context.destroy(linger=0)

    def _receive(self, data: bytes, tasks: asyncio.TaskGroup) -> None:
        try:
            message = decode(data, ToNode)
        except MessageRefused as exc:
            logger.warning("an order of the orchestrator was refused: %s", exc)
            return
        if message.session != self._session:
            self._start_session(message.session)
        match message.body:
            case RunGroupOrder() | AskNodePrompt() as asked:
                self._newest_call = asked.call_id
                task = tasks.create_task(self._answer(asked, message.session), name=f"call-{asked.call_id}")
                self._running[asked.call_id] = task
                task.add_done_callback(lambda done, call_id=asked.call_id: self._forget(call_id, done))
            case Cancel(call_id=call_id):
                if (task := self._running.get(call_id)) is not None:
                    task.cancel()
            case StartSession():
                self._post(PoolLoaded(infos=dict(self._pool.infos)), message.session)

    def _start_session(self, session: str) -> None:
        for task in self._running.values():
            task.cancel()
        self._session, self._newest_call, self._running = session, -1, {}
        self._events.clear()
        self._pool.report_to(self._note_event)

    def _forget(self, call_id: int, task: asyncio.Task[None]) -> None:
        if self._running.get(call_id) is task:
            del self._running[call_id]

    async def _answer(self, asked: RunGroupOrder | AskNodePrompt, session: str) -> None:
        answer = await self._execute(asked)
        try:
            self._post(answer, session)
        except MessageRefused as exc:
            self._post(CallFailed(call_id=asked.call_id, kind=type(exc).__name__, message=str(exc)), session)

    async def _execute(self, asked: RunGroupOrder | AskNodePrompt) -> GroupDone | PromptFound | CallFailed | CallLost:
        try:
            if isinstance(asked, AskNodePrompt):
                messages = await self._pool.prompt(asked.env, split=asked.split, example_id=asked.example_id)
                return PromptFound(call_id=asked.call_id, messages=messages)
            rollouts = await self._pool.run_group(asked.request)
            return GroupDone(call_id=asked.call_id, rollouts=rollouts)
        except WorkerLost as exc:
            return CallLost(call_id=asked.call_id, message=str(exc))
        except RolloutFailed as exc:
            return CallFailed(call_id=asked.call_id, kind=exc.kind, message=str(exc), is_infrastructure=exc.is_infrastructure)
        except Exception as exc:  # it must not end the groups of the other calls
            logger.exception("call %d failed", asked.call_id)
            return CallFailed(call_id=asked.call_id, kind=type(exc).__name__, message=str(exc))

    async def _beat(self) -> None:
        while True:
            events, self._events = self._events, []
            beat = NodeBeat(
                newest_call=self._newest_call,
                running=list(self._running),
                workers=list(self._pool.status()),
                metrics=dict(self._pool.metrics()),
                events=events,
            )
            self._post(beat, self._session)
            await asyncio.sleep(_BEAT_INTERVAL_S)

    async def _send(self) -> None:
        while True:
            await self._socket.send_multipart(in_frames(await self._outgoing.get()))

    def _post(self, body: NodeAnswer, session: str) -> None:
        data = encode(FromNode(node=self._node, instance=self._instance, session=session, body=body))
        if len(data) > MAX_MESSAGE_BYTES:
            raise MessageRefused(f"a message of {len(data) / 2**20:.0f} MiB is larger than what fits between nodes")
        self._outgoing.put_nowait(data)

    def _note_event(self, event: Event) -> None:
        assert isinstance(event, EnvLoad | EnvRestart)
        self._events.append(event)
