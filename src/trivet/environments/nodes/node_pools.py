"""Runs groups on the environment workers of several nodes: chooses the node of a group, and goes on without one that is lost.

Owned by the orchestrator, which listens; the pools of other nodes (`nodes.pool_server`) connect to it. A group goes to the node
with the fewest pending ones of its environment. One that was lost with its worker goes to the same node again, which counts its
losses; one that was lost with its node goes to another.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import zmq
import zmq.asyncio

from trivet.config.schema.environment import EnvNodesConfig
from trivet.environments.nodes.connection import KEY_PURPOSE, open_socket
from trivet.environments.nodes.node import RemoteNode
from trivet.environments.workers.pool import MAX_LOSSES, WorkerPool
from trivet.errors import ConfigError, EnvironmentLoadError, MessageRefused, WaitTimeout, WorkerLost, first_error
from trivet.process.sockets import in_frames, listen_encrypted
from trivet.secret import RunSecret
from trivet.wire.codec import decode, encode
from trivet.wire.events import EnvLoad, EnvRestart, Event
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus
from trivet.wire.versions import GroupId
from trivet.wire.worker_nodes import FromNode, ToNode

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0
_OTHERS_WITHIN_S = 60.0
"""Once one node has loaded its environments, a start waits this long for the others. Later ones join when they have."""

GroupKey = tuple[str, Split, GroupId]


class NodePools:
    """An `EnvironmentPool` of the pools of several nodes.

    >>> async with open_node_pools(local, config.env_nodes, secret=secret, timeout_s=1800) as pool:
    ...     keeping = asyncio.create_task(pool.run())
    ...     rollouts = await pool.run_group(request)
    """

    def __init__(
        self,
        local: WorkerPool | None,
        config: EnvNodesConfig,
        *,
        secret: RunSecret,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen for the other nodes.

        Args:
            local: the pool of this node, which has loaded its environments; None when it has none.

        Raises:
            ConfigError: the port is in use.
        """
        self._local = local
        self._config = config
        self._clock = clock
        self._nodes = {index: RemoteNode(index, post=self._post) for index in config.nodes if index != config.own}
        self._infos: dict[str, EnvironmentInfo] = dict(local.infos) if local is not None else {}
        self._homes: dict[GroupKey, RemoteNode | WorkerPool] = {}
        """The pool that counts the losses of a group."""
        self._num_pending: Counter[tuple[RemoteNode | WorkerPool, str]] = Counter()
        """Groups that each pool runs, by environment."""
        self._has_started = False
        self._loaded: list[EnvLoad | EnvRestart] = []
        """Events kept until `report_to` is called."""
        self._write_event: Callable[[Event], None] = self._keep_event
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
                "end the program that listens there, or set deployment.host to an address of this node"
            ) from exc
        self._serving = asyncio.create_task(self._serve(), name="serve-env-nodes")

    @property
    def infos(self) -> Mapping[str, EnvironmentInfo]:
        """See `EnvironmentPool.infos`."""
        return self._infos

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group on one of the nodes; see `EnvironmentPool.run_group`."""
        key = (request.env, request.split, request.group_id)
        pool = await self._choose(request.env, home=self._homes.pop(key, None))
        self._num_pending[pool, request.env] += 1
        try:
            return await pool.run_group(request)
        except WorkerLost:
            if pool in self._ready():  # else it was lost with its node
                self._homes[key] = pool
            raise
        finally:
            self._num_pending[pool, request.env] -= 1

    async def prompt(self, env: str, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """Return the messages that an example starts with."""
        for _ in range(MAX_LOSSES - 1):
            with suppress(WorkerLost):
                return await (await self._choose(env)).prompt(env, split=split, example_id=example_id)
        return await (await self._choose(env)).prompt(env, split=split, example_id=example_id)

    async def run(self) -> None:
        """Keep the workers of this node alive and hear the others, until cancelled.

        Raises:
            RoleFailed: a worker of this node ended too often.
        """
        async with asyncio.TaskGroup() as tasks:
            if self._local is not None:
                tasks.create_task(self._local.run(), name="run-own-env-workers")
            await asyncio.shield(self._serving)

    def status(self) -> Sequence[WorkerStatus]:
        """Return what each worker is doing, on every node. May be called from another thread."""
        own = self._local.status() if self._local is not None else []
        return [*own, *(worker for node in self._nodes.values() for worker in node.workers)]

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of all pools; those of failed groups are summed."""
        values = dict(self._local.metrics()) if self._local is not None else {}
        for node in self._nodes.values():
            for name, value in node.take_metrics().items():
                values[name] = values.get(name, 0.0) + value
        return values

    def report_to(self, write_event: Callable[[Event], None]) -> None:
        """Write an event with `write_event` for each environment that is loaded, on each node, and at every restart."""
        self._write_event = write_event
        if self._local is not None:
            self._local.report_to(write_event)
        for event in self._loaded:
            write_event(event)
        self._loaded.clear()

    async def wait_loaded(self, *, timeout_s: float) -> None:
        """Wait until a node has loaded its environments, and a while for the others.

        Raises:
            EnvironmentLoadError: one has other data than the others.
            WaitTimeout: none has.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_until(self._ready)
        except TimeoutError:
            raise WaitTimeout(
                f"{self._describe_missing()} not connected after {timeout_s:g} s: see logs/env-workers-N.stdout and "
                f"logs/env_workers/; the node must reach {self._config.host}:{self._config.port}, which deployment.host changes. "
                "Raise orchestrator.env_start_timeout_s if its environments need longer to load"
            ) from None
        try:
            async with asyncio.timeout(min(_OTHERS_WITHIN_S, timeout_s)):
                await self._wait_until(lambda: all(node.infos is not None for node in self._nodes.values()))
        except TimeoutError:
            logger.warning("%s not connected yet; the run begins without them", self._describe_missing())
        self._has_started = True

    async def aclose(self) -> None:
        """Close the connections. May be called again."""
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for a change of the nodes after which `condition` holds; raise what ended `_serve`."""

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(condition)

        waiting = asyncio.create_task(wait(), name="wait-for-env-nodes")
        try:
            await asyncio.wait({waiting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._serving.done():
            try:
                self._serving.result()
            except ExceptionGroup as failed:
                raise first_error(failed) from None

    def _describe_missing(self) -> str:
        missing = [str(index) for index, node in self._nodes.items() if node.infos is None]
        return f"the environment workers of node {', '.join(missing)} have"

    async def _choose(self, env: str, *, home: RemoteNode | WorkerPool | None = None) -> RemoteNode | WorkerPool:
        """Return the pool with the fewest pending groups of an environment, or `home` if it is there; wait while none is."""
        while True:
            ready = self._ready()
            if home in ready:
                return home
            if ready:
                return min(ready, key=lambda pool: self._num_pending[pool, env])
            await self._wait_until(self._ready)

    def _ready(self) -> list[RemoteNode | WorkerPool]:
        own = [self._local] if self._local is not None else []
        return [*own, *(node for node in self._nodes.values() if node.infos is not None)]

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send(), name="send-to-env-nodes")
            tasks.create_task(self._watch(), name="watch-env-nodes")
            while True:
                connection, *frames = await self._socket.recv_multipart()
                try:
                    message = decode(b"".join(frames), FromNode)
                except MessageRefused as exc:
                    logger.warning("a message of environment workers on another node was refused: %s", exc)
                    continue
                if (node := self._nodes.get(message.node)) is not None:
                    await self._receive(node, connection, message)

    async def _receive(self, node: RemoteNode, connection: bytes, message: FromNode) -> None:
        was_ready = node.infos is not None
        for event in node.receive(connection, message, now=self._clock()):
            self._write_event(event)
        if was_ready and node.infos is None:
            logger.warning("node %d: its environment workers were restarted; their groups are retried", node.index)
        if not was_ready and node.infos is not None:
            try:
                self._require_same(node)
            except EnvironmentLoadError as exc:
                if not self._has_started:
                    raise
                node.infos = None
                logger.warning("node %d is left out: %s", node.index, exc)
                return
            logger.info("node %d: environment workers ready", node.index)
            async with self._changed:
                self._changed.notify_all()

    def _require_same(self, node: RemoteNode) -> None:
        assert node.infos is not None
        for name, info in node.infos.items():
            known = self._infos.setdefault(name, info)
            if known != info:
                raise EnvironmentLoadError(
                    f"environment {name!r} has other data on node {node.index} ({info.num_examples} examples) than elsewhere "
                    f"({known.num_examples}): install the same version of it and of its data on every node"
                )

    async def _send(self) -> None:
        while True:
            # Nothing waits here for a node that is gone: such a message is dropped, and the node's next beat shows it.
            connection, data = await self._outgoing.get()
            await self._socket.send_multipart([connection, *in_frames(data)])

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

    def _keep_event(self, event: Event) -> None:
        assert isinstance(event, EnvLoad | EnvRestart)
        self._loaded.append(event)


@asynccontextmanager
async def open_node_pools(
    local: WorkerPool | None, config: EnvNodesConfig, *, secret: RunSecret, timeout_s: float
) -> AsyncIterator[NodePools]:
    """Open the pools of several nodes, with every environment loaded.

    Raises:
        ConfigError, EnvironmentLoadError, WaitTimeout: as `NodePools`.
    """
    pools = NodePools(local, config, secret=secret)
    try:
        await pools.wait_loaded(timeout_s=timeout_s)
        yield pools
    finally:
        await pools.aclose()
