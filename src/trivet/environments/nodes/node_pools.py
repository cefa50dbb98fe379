"""Runs groups on the environment workers of several nodes: chooses the node of a group, and goes on without one that is lost.

Owned by the orchestrator, which listens; the pools of the nodes (`nodes.pool_server`) connect to it. Any pool that has the key of
the run and a number below a limit may join and leave while the run goes on. A group goes to the node with the fewest pending ones
of its environment. One that was lost with its worker goes to the same node again, which counts its losses; one that was lost with
its node goes to another.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import zmq
import zmq.asyncio

from trivet.config.schema.environment import EnvNodesConfig
from trivet.environments.nodes.connection import KEY_PURPOSE, open_socket
from trivet.environments.nodes.node import RemoteNode
from trivet.environments.workers.pool import MAX_LOSSES
from trivet.errors import ConfigError, EnvironmentLoadError, MessageRefused, WaitTimeout, WorkerLost
from trivet.process.sockets import in_frames, listen_encrypted
from trivet.secret import RunSecret
from trivet.wire.codec import decode, encode
from trivet.wire.events import Event
from trivet.wire.groups import EnvironmentInfo, Example, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus
from trivet.wire.versions import GroupId
from trivet.wire.worker_nodes import FromNode, ToNode

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0
_OTHERS_WITHIN_S = 60.0
"""Once one node has loaded its environments, a start waits this long for the others that are required."""
_CLOSE_TIMEOUT_S = 1.0
"""Longest time for the nodes to get the message that the orchestrator ends."""


class NodePools:
    """An `EnvironmentPool` of the pools of several nodes.

    >>> async with open_node_pools(config.env_nodes, secret=secret, timeout_s=1800) as pool:
    ...     keeping = asyncio.create_task(pool.run())
    ...     rollouts = await pool.run_group(request)
    """

    def __init__(self, config: EnvNodesConfig, *, secret: RunSecret, clock: Callable[[], float] = time.monotonic) -> None:
        """Listen for the nodes.

        Raises:
            ConfigError: the port is in use.
        """
        self._config = config
        self._clock = clock
        self._nodes: dict[int, RemoteNode] = {}
        """Every node that was ever heard, by its number."""
        self._infos: dict[str, EnvironmentInfo] = {}
        self._homes: dict[tuple[str, Split, GroupId], RemoteNode] = {}
        """The node that counts the losses of a group."""
        self._difference = ""
        """How the data of a node differ from those of the others. It ends a start."""
        self._loaded: list[Event] = []
        """Events kept until `report_to` is called."""
        self._write_event: Callable[[Event], None] = self._loaded.append
        self._changed = asyncio.Condition()
        self._outgoing: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self._context = zmq.asyncio.Context()
        self._socket = open_socket(self._context, zmq.ROUTER)
        try:
            listen_encrypted(self._socket, host=config.host, port=config.port, key=secret.derive(KEY_PURPOSE))
        except OSError as exc:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"the orchestrator cannot listen for environment workers on {config.host}:{config.port}: {exc.strerror}; "
                "end the program that listens there, or start Ray on this machine with the address that other nodes reach"
            ) from exc
        self._serving = asyncio.create_task(self._serve(), name="serve-env-nodes")

    @property
    def infos(self) -> Mapping[str, EnvironmentInfo]:
        """See `EnvironmentPool.infos`."""
        return self._infos

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group on one of the nodes; see `EnvironmentPool.run_group`."""
        key = (request.env, request.split, request.group_id)
        node = await self._choose(request.env, home=self._homes.pop(key, None))
        try:
            return await node.run_group(request)
        except WorkerLost:
            if node.is_ready:  # else it was lost with its node
                self._homes[key] = node
            raise

    async def example(self, env: str, *, split: Split, example_id: int) -> Example:
        """Return an example of the data."""
        for _ in range(MAX_LOSSES - 1):
            with suppress(WorkerLost):
                return await (await self._choose(env)).example(env, split=split, example_id=example_id)
        return await (await self._choose(env)).example(env, split=split, example_id=example_id)

    async def run(self) -> None:
        """Hear the nodes, until cancelled."""
        await asyncio.shield(self._serving)

    def status(self) -> Sequence[WorkerStatus]:
        """Return what each worker is doing, on every node. May be called from another thread."""
        return [worker for node in list(self._nodes.values()) for worker in node.workers]

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of all pools; those of failed groups are summed."""
        values: dict[str, float] = {}
        for node in self._nodes.values():
            for name, value in node.take_metrics().items():
                values[name] = values.get(name, 0.0) + value
        return values

    def report_to(self, write_event: Callable[[Event], None]) -> None:
        """Write an event with `write_event` for each environment that is loaded, on each node, and at every restart."""
        self._write_event = write_event
        while self._loaded:
            write_event(self._loaded.pop(0))

    async def wait_loaded(self, *, timeout_s: float) -> None:
        """Wait until a node has loaded its environments, and a while for the others that are required.

        Raises:
            EnvironmentLoadError: one has other data than the others.
            WaitTimeout: none has.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_until(lambda: self._difference or self._ready())
        except TimeoutError:
            raise WaitTimeout(
                f"no environment workers of a node have connected after {timeout_s:g} s: see logs/env-workers-N.stdout and "
                f"logs/env_workers/; the nodes must reach {self._config.host}:{self._config.port}, "
                "the address with which Ray was started. "
                "Raise orchestrator.env_start_timeout_s if their environments need longer to load"
            ) from None
        required = self._config.num_required
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_OTHERS_WITHIN_S, timeout_s)):
                await self._wait_until(lambda: self._difference or len(self._ready()) >= required)
        if self._difference:
            raise EnvironmentLoadError(self._difference)
        if len(found := self._ready()) < required:
            logger.warning("environment workers are ready on %d of %d nodes; the others join later", len(found), required)

    async def aclose(self) -> None:
        """End the sessions of the nodes and close the connections. May be called again."""
        if not self._serving.done():
            for node in self._nodes.values():
                node.end_session()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._outgoing.join()
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._context.destroy(linger=int(_CLOSE_TIMEOUT_S * 1000))

    async def _wait_until(self, condition: Callable[[], object]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _choose(self, env: str, *, home: RemoteNode | None = None) -> RemoteNode:
        """Return the node with the fewest pending groups of an environment, or `home` if it is there; wait while none is."""
        while not (ready := self._ready()):
            await self._wait_until(self._ready)
        return home if home is not None and home.is_ready else min(ready, key=lambda node: node.num_pending[env])

    def _ready(self) -> list[RemoteNode]:
        return [node for node in self._nodes.values() if node.is_ready]

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send(), name="send-to-env-nodes")
            tasks.create_task(self._watch(), name="watch-env-nodes")
            while True:
                connection, *frames = await self._socket.recv_multipart()
                try:
                    await self._receive(connection, decode(b"".join(frames), FromNode))
                except MessageRefused as exc:
                    logger.warning("a message of environment workers on another node was refused: %s", exc)

    async def _receive(self, connection: bytes, message: FromNode) -> None:
        if not 0 <= message.node < self._config.max_nodes:
            raise MessageRefused(f"it has the node number {message.node}, not 0 to {self._config.max_nodes - 1}")
        if (node := self._nodes.get(message.node)) is None:
            node = self._nodes[message.node] = RemoteNode(message.node, post=self._post)
        was_ready = node.is_ready
        for event in node.receive(connection, message, now=self._clock()):
            self._write_event(event)
        if not was_ready and node.is_ready:
            if difference := self._find_difference(node):
                node.is_refused, self._difference = True, difference
                logger.warning("node %d is left out: %s", node.number, difference)
            else:
                logger.info("node %d: environment workers ready", node.number)
            async with self._changed:
                self._changed.notify_all()

    def _find_difference(self, node: RemoteNode) -> str:
        for name, info in (node.infos or {}).items():
            known = self._infos.setdefault(name, info)
            if known != info:
                return (
                    f"environment {name!r} has other data on node {node.number} ({info.num_examples} examples) than elsewhere "
                    f"({known.num_examples}): install the same version of it and of its data on every node"
                )
        return ""

    async def _send(self) -> None:
        while True:
            # Nothing waits here for a node that is gone: such a message is dropped, and the node's next beat shows it.
            connection, data = await self._outgoing.get()
            await self._socket.send_multipart([connection, *in_frames(data)])
            self._outgoing.task_done()

    async def _watch(self) -> None:
        before = self._clock()
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            now = self._clock()
            was_suspended, before = now - before > 3 * _CHECK_INTERVAL_S, now
            for node in self._nodes.values():
                if was_suspended:
                    node.restart_silence(now=now)
                if reason := node.check(now=self._clock()):
                    logger.warning("%s; its groups are run elsewhere", reason)

    def _post(self, connection: bytes, message: ToNode) -> None:
        self._outgoing.put_nowait((connection, encode(message)))


@asynccontextmanager
async def open_node_pools(config: EnvNodesConfig, *, secret: RunSecret, timeout_s: float) -> AsyncIterator[NodePools]:
    """Open the pools of several nodes, with every environment loaded.

    Raises:
        ConfigError, EnvironmentLoadError, WaitTimeout: as `NodePools`.
    """
    pools = NodePools(config, secret=secret)
    try:
        await pools.wait_loaded(timeout_s=timeout_s)
        yield pools
    finally:
        await pools.aclose()
