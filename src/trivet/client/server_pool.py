"""Gives a run its inference servers: has them serve a policy, and says which take rollouts.

A server takes rollouts once it is admitted: it answers and serves the target policy, proven by its digest. One that fails is
marked unhealthy until it serves the target again.

    PolicyWatcher --ensure_policy--> ServerPool --update_weights--> inference servers
                                      |  sets the target             ^                  ^
                                      v                              | probes           | looks up
    Dispatcher <--pick, on_down-- ServerSet <---admit, mark--- ServerHealthMonitor  ServerDiscovery (with a DNS name)
                                  unhealthy

| waits for | unblocked by |
|---|---|
| `start`: every listed server, or one behind the name | its answer; `client.wait_for_ready_timeout` |
| `ensure_policy`: one server that serves the policy | a load, or an admission; `require_servers` ends the run |
| `sleep`: every known server | its answer; its refusal, if elastic; `client.wait_for_ready_timeout` |
| a task per server: the next probe, or the next try to admit | an interval, or a growing pause; after `sleep`: `ensure_policy` |
| `require_servers`: an admitted server | an admission; `client.wait_for_ready_timeout` |

Writes Load, ServerUp and ServerDown events. Nobody else asks a server to load.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from trivet.client.discovery import Resolve, ServerDiscovery, resolve
from trivet.client.health import ServerHealthMonitor
from trivet.client.inference_client import InferenceClient
from trivet.client.load import ServerLoad
from trivet.client.server import Server, TargetPolicy
from trivet.client.server_set import ServerSet
from trivet.client.sleeping import sleep_all
from trivet.config.schema.inference import ClientConfig
from trivet.errors import ForeignPolicy, InferenceError, PolicyRefused
from trivet.wire.events import Event
from trivet.wire.versions import START_VERSION

logger = logging.getLogger(__name__)

_LATE_S = 30.0
"""When half of the servers have loaded a policy, the others have this time, or as long again if that is more. A server that reads
weights from busy shared storage takes longer than the others; one that was lost never answers."""


class ServerPool:
    """Serves policies with the servers of `client.base_url`, or with those behind a DNS name."""

    def __init__(
        self,
        config: ClientConfig,
        *,
        make_client: Callable[[str], InferenceClient],
        write_event: Callable[[Event], None],
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Make a pool without servers; `start` finds them.

        Args:
            make_client: from a server's address to a client of its own.
            resolve: looks up `client.elastic.hostname`.
        """
        self._config = config
        self._clock = clock
        self._sleep = sleep
        self._make_client = make_client
        self._servers = ServerSet(write_event=write_event, clock=clock)
        self._monitor = ServerHealthMonitor(self._servers, clock=clock, sleep=sleep)
        self._discovery: ServerDiscovery | None = None
        self._answered: list[Server] = []
        """Servers that answered at the start."""
        if config.elastic is not None:
            self._discovery = ServerDiscovery(
                config.elastic, self._servers, make_client=make_client, resolve=resolve, clock=clock, sleep=sleep
            )

    @property
    def roots(self) -> list[str]:
        """The addresses of the servers that take rollouts."""
        return [server.root for server in self._servers.admitted]

    async def start(self) -> None:
        """Return once every listed server answers; with a DNS name, once one behind it does.

        Raises:
            InferenceError: that took longer than `client.wait_for_ready_timeout`.
        """
        timeout_s = self._config.wait_for_ready_timeout
        if self._discovery is not None:
            self._answered = await self._discovery.wait_ready(timeout_s)
            logger.info("inference ready urls=%s", ", ".join(server.root for server in self._answered))
            return
        for url in self._config.base_url:
            server = self._servers.add(self._make_client(url))
            await server.client.wait_ready(timeout_s)
            self._answered.append(server)
            logger.info("inference ready url=%s", server.root)

    async def ensure_policy_on_all(self, policy: TargetPolicy, *, reset: bool = True) -> TargetPolicy:
        """Have every server serve `policy` and admit it: before the first rollout.

        They load it at once. One that did not answer at the start is not waited for: `run` admits it when it does.

        Args:
            policy: becomes the target.
            reset: of the start model: have servers that serve something else go back to it; else they are refused.

        Returns:
            `policy` with its digest.

        Raises:
            InferenceError: a listed server failed, or all behind a DNS name did; or their start models differ.
        """
        self._servers.may_wake = True
        waiting = [server for server in self._servers.known if server.is_admitted or server in self._answered]
        if policy.directory is None and not reset:
            await self._require_start_model(waiting)
        errors: list[InferenceError] = []
        while waiting and policy.digest is None:  # the first that serves the start model says its digest
            policy, error = await self._load_and_admit(waiting.pop(0), policy)
            errors += [error] if error is not None else []
        loaded = await asyncio.gather(*(self._load_and_admit(server, policy) for server in waiting))
        errors += [error for _, error in loaded if error is not None]
        if errors and (self._discovery is None or not self._servers.admitted):
            raise errors[0]
        return policy

    async def _load_and_admit(self, server: Server, policy: TargetPolicy) -> tuple[TargetPolicy, InferenceError | None]:
        """Return `policy` with the digest that the server says, and why the server was not admitted."""
        try:
            status = await server.ensure_policy(policy)
        except InferenceError as exc:
            server.last_error = str(exc)
            return policy, exc
        policy = self._servers.target = replace(policy, digest=status.digest)
        self._servers.admit(server)
        return policy, None

    async def ensure_policy(self, policy: TargetPolicy) -> None:
        """Have the admitted servers serve `policy`, and return once at least one does.

        One that fails, or takes much longer than most, is marked unhealthy: a lost node must not hold up the others.

        Raises:
            PolicyRefused: every server says that the weights directory is not whole.
            ForeignPolicy: a server reports something else after loading it.
        """
        self._servers.target, self._servers.may_wake = policy, True
        admitted = self._servers.admitted
        errors = await self._ensure_on_most(admitted, policy)
        refused = [error for error in errors if isinstance(error, PolicyRefused)]
        if admitted and len(refused) == len(admitted):
            raise refused[0]
        await self._servers.wait_for_admitted()

    async def sleep(self) -> None:
        """Have every server free its GPU memory. Until the next `ensure_policy` no server is admitted or woken.

        Raises:
            InferenceError: a server was started without `inference.sleep_while_training`, or kept its memory for
                `client.wait_for_ready_timeout`.
        """
        self._servers.may_wake = False
        timeout_s = self._config.wait_for_ready_timeout
        await sleep_all(self._servers, timeout_s=timeout_s, clock=self._clock, sleep=self._sleep)

    async def run(self) -> None:
        """Watch the servers until cancelled.

        Raises:
            InferenceError: no server was left for longer than `client.wait_for_ready_timeout`.
            ForeignPolicy: a server serves what this run did not give it.
        """
        async with asyncio.TaskGroup() as tasks:
            for server in self._servers.known:
                self._monitor.watch(tasks, server)
            if self._discovery is not None:
                tasks.create_task(self._discovery.follow(tasks, self._monitor), name="server-names")
            await self._monitor.require_servers(max_empty_s=self._config.wait_for_ready_timeout)

    def subscribe(self, *, on_down: Callable[[str], None], on_up: Callable[[], None]) -> None:
        """See `ServerSet.subscribe`."""
        self._servers.subscribe(on_down=on_down, on_up=on_up)

    def pick(self, *, num_rollouts: int) -> str | None:
        """See `ServerSet.pick`."""
        return self._servers.pick(num_rollouts=num_rollouts)

    def release(self, root: str, *, num_rollouts: int) -> None:
        """See `ServerSet.release`."""
        self._servers.release(root, num_rollouts=num_rollouts)

    async def is_at_fault(self, root: str) -> bool:
        """See `ServerHealthMonitor.is_at_fault`."""
        return await self._monitor.is_at_fault(root)

    def probe_metrics(self) -> dict[str, float]:
        """Return `probe/mismatch` of the admitted server that reproduces its policy least closely; nothing without a probe."""
        found = [server.status.probe_mismatch for server in self._servers.admitted if server.status is not None]
        known = [mismatch for mismatch in found if mismatch is not None]
        return {"probe/mismatch": max(known)} if known else {}

    async def server_loads(self) -> list[ServerLoad]:
        """Return how busy the admitted servers are. Those that do not say are left out."""
        answers = await asyncio.gather(*(_ask_load(server) for server in self._servers.admitted))
        return [load for load in answers if load is not None]

    async def aclose(self) -> None:
        """Close every client. May be called again."""
        for server in self._servers.known:
            await self._servers.remove(server.root).client.aclose()

    async def _require_start_model(self, servers: list[Server]) -> None:
        for server in servers:
            status = await server.client.served_policy()
            if status.version != START_VERSION:
                raise InferenceError(
                    f"{server.root} holds policy {status.version} and the run starts from the base model; set "
                    "orchestrator.reload_weights_on_start = true"
                )

    async def _ensure_on_most(self, servers: list[Server], policy: TargetPolicy) -> list[InferenceError | None]:
        """Return the error of each server that ended in time; servers that are much later than half of all are not waited for."""
        if not servers:
            return []
        begun, may_go_on, num_loaded, num_ended = self._clock(), asyncio.Event(), 0, 0

        async def load(server: Server) -> InferenceError | None:
            nonlocal num_loaded, num_ended
            has_error = True
            try:
                error = await self._ensure_on(server, policy)
                num_loaded += error is None
                has_error = False
                return error
            finally:
                num_ended += 1
                if has_error or 2 * num_loaded >= len(servers) or num_ended == len(servers):
                    may_go_on.set()

        loads = {asyncio.create_task(load(server), name=f"load-{server.root}"): server for server in servers}
        try:
            await may_go_on.wait()
            more_s = max(_LATE_S, self._clock() - begun)
            done, late = await asyncio.wait(loads, timeout=more_s, return_when=asyncio.FIRST_EXCEPTION)
            errors = [task.result() for task in loads if task in done]
        finally:
            for task in loads:
                task.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
        for task in late:
            self._servers.mark_unhealthy(loads[task], f"it did not load policy {policy.version} when half of the servers had")
        return errors

    async def _ensure_on(self, server: Server, policy: TargetPolicy) -> InferenceError | None:
        try:
            await server.ensure_policy(policy, is_known_to_differ=True)
        except ForeignPolicy:
            raise
        except InferenceError as exc:
            self._servers.mark_unhealthy(server, f"it did not load policy {policy.version}: {exc}")
            return exc
        if server.is_admitted:
            self._servers.record_load(server, policy)
        return None


async def _ask_load(server: Server) -> ServerLoad | None:
    try:
        return await server.client.server_load()
    except InferenceError as exc:
        logger.debug("no load of %s: %s", server.root, exc)
        return None
