"""Keeps the inference servers of a run: makes them serve a policy, and chooses the server of each group.

A server gets rollouts once it is admitted: it answers and serves the target policy, proven by its digest. A server that fails is
marked unhealthy until it serves the target policy again.

    PolicyWatcher --ensure_policy--> ServerPool --update_weights--> inference servers
                                      ^      ^                       ^
                     pick, on_down    |      | admit, mark unhealthy | find, check
    Dispatcher <----------------------+      +-------------------- ServerMonitor

| waits for | unblocked by |
|---|---|
| `start`: every server of `client.base_url`, or one of `client.elastic` | its answer; `client.wait_for_ready_timeout` |
| `ensure_policy`: one server that serves the policy | a load, or an admission; `ServerMonitor` ends the run |
| `sleep`: every known server | its answer; its refusal, if elastic; `client.wait_for_ready_timeout` |
| a task per server: the next check, or attempt to admit | an interval, or a growing pause; after `sleep`: `ensure_policy` |
| `ServerMonitor`: an admitted server | an admission; `client.wait_for_ready_timeout` |

Writes Load, ServerUp and ServerDown events. During a run only this package asks a server to load a policy.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from urllib.parse import urlsplit

from trivet.client.health import Resolve, ServerMonitor, resolve
from trivet.client.inference_client import InferenceClient
from trivet.client.server import Server, TargetPolicy
from trivet.client.server_load import ServerLoad
from trivet.client.transfer_rounds import TransferRounds
from trivet.config.schema.inference import ClientConfig
from trivet.errors import ForeignPolicy, InferenceError, PolicyRefused, ServerGone
from trivet.key_names import key_name
from trivet.process.sockets import is_loopback
from trivet.wire.events import Event, Load, ServerDown, ServerUp
from trivet.wire.versions import START_VERSION

logger = logging.getLogger(__name__)

_RETRY_INTERVAL_S = 1.0
"""Seconds between two requests to a server that does not sleep yet."""
_REPORT_INTERVAL_S = 30.0
"""Seconds between two log lines about servers that do not sleep yet."""
_LATE_LOAD_TIMEOUT_S = 30.0
"""Once half of the servers have loaded a policy, the others have this long, or as long as the first half took if that is longer.
The limit is needed because a lost server never answers. It is long because reading weights from busy shared storage takes time."""


class ServerPool:
    """Serves policies with the servers of `client.base_url` or `client.elastic`."""

    def __init__(
        self,
        config: ClientConfig,
        *,
        make_client: Callable[[str], InferenceClient],
        write_event: Callable[[Event], None],
        origin: str | None = None,
        transfers: TransferRounds | None = None,
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Make a pool without servers; `start` finds them.

        Args:
            make_client: makes the client of the server at an address.
            origin: the address from which servers fetch policies; None if they read directories.
            transfers: plans how the trainer sends policies to the servers; None: they read the files.
            resolve: looks up `client.elastic.hostname`.
        """
        self._config = config
        self._write_event = write_event
        self._origin = origin
        self._transfers = transfers
        self._clock = clock
        self._sleep = sleep
        self.target = TargetPolicy(version=START_VERSION, digest=None, directory=None)
        """The policy that every server should serve. It is set before the first server is admitted."""
        self._previous_target = self.target
        self.may_wake = asyncio.Event()
        """Not set while every server must leave its GPU's memory to the trainer. No server is admitted then."""
        self.may_wake.set()
        self.servers: dict[str, Server] = {}
        """Every server, admitted or not, by its address. `ServerMonitor` adds and removes them."""
        self._has_admitted = asyncio.Event()
        """Set while at least one server is admitted."""
        self._no_server_since = 0.0
        """Monotonic seconds at which the last admitted server was lost."""
        self._on_down: list[Callable[[str], None]] = []
        self._on_up: list[Callable[[], None]] = []
        self._monitor = ServerMonitor(config, self, make_client=make_client, resolve=resolve, clock=clock, sleep=sleep)
        self.run, self.is_at_fault = self._monitor.run, self._monitor.is_at_fault
        """See `ServerMonitor`."""
        self._answered: list[Server] = []
        """Servers that answered at the start."""

    @property
    def admitted(self) -> list[Server]:
        """The servers that take rollouts."""
        return [server for server in self.servers.values() if server.is_admitted]

    @property
    def roots(self) -> list[str]:
        """The addresses of the servers that take rollouts."""
        return [server.root for server in self.admitted]

    @property
    def sources(self) -> list[str]:
        """The addresses from which a server can fetch a policy: of the origin and of admitted servers. Empty without an origin.

        Before the first admission, the servers that answered at the start count. Addresses on loopback are left out, because they
        lead other servers to themselves.
        """
        roots = self.roots or [server.root for server in self._answered]
        peers = [root for root in roots if not is_loopback(urlsplit(root).hostname or "")]
        return [self._origin, *peers] if self._origin is not None else []

    @property
    def no_server_s(self) -> float | None:
        """Seconds since the last admitted server was lost; None while a server is admitted, or while all must sleep."""
        return None if self._has_admitted.is_set() or not self.may_wake.is_set() else self._clock() - self._no_server_since

    def subscribe(self, *, on_down: Callable[[str], None], on_up: Callable[[], None]) -> None:
        """Register two functions: `on_down` gets the address of each server marked unhealthy; `on_up` follows each admission.

        The rollouts on a server marked unhealthy are lost.
        """
        self._on_down.append(on_down)
        self._on_up.append(on_up)

    def admit(self, server: Server) -> None:
        """Send rollouts to `server` from now on. It must serve `target`."""
        server.is_admitted = True
        server.num_timeouts = server.num_attempts = 0
        self.record_load(server, self.target)
        self._write_event(ServerUp(server=server.root, version=self.target.version, digest=self.target.digest or ""))
        self._has_admitted.set()
        for notify in self._on_up:
            notify()

    def mark_unhealthy(self, server: Server, reason: str) -> None:
        """Stop sending rollouts to `server`, if it was admitted."""
        if not server.is_admitted:
            return
        server.is_admitted, server.status = False, None
        server.last_error = reason
        logger.warning("server marked unhealthy url=%s: %s", server.root, reason)
        self._write_event(ServerDown(server=server.root, reason=reason))
        if not self.admitted:
            self._has_admitted.clear()
            self._no_server_since = self._clock()
        for notify in self._on_down:
            notify(server.root)

    def record_load(self, server: Server, policy: TargetPolicy) -> None:
        """Write the event that `server` serves `policy` now."""
        assert server.status is not None, "a load is recorded after the server's answer"
        self._write_event(
            Load(
                version=policy.version,
                digest=policy.digest or "",
                server=server.root,
                probe_mismatch=server.status.probe_mismatch,
                probe_limit=server.status.probe_limit,
                source=server.status.source,
            )
        )

    def pick(self, *, num_rollouts: int) -> str | None:
        """Return the address of the admitted server with the fewest rollouts in flight, and count `num_rollouts` more there.

        Servers that are full, by their last load, come last. Return None while no server is admitted.
        """
        server = min(self.admitted, key=lambda server: (server.is_full, server.num_in_flight), default=None)
        if server is None:
            return None
        server.num_in_flight += num_rollouts
        return server.root

    def release(self, root: str, *, num_rollouts: int) -> None:
        """Count `num_rollouts` rollouts on the server with address `root` as ended."""
        if (server := self.servers.get(root)) is not None:
            server.num_in_flight -= num_rollouts

    async def start(self) -> None:
        """Wait until every server of `client.base_url` answers, or one server of `client.elastic`.

        Raises:
            InferenceError: the wait took longer than `client.wait_for_ready_timeout`.
        """
        self._answered = await self._monitor.start()
        logger.info("inference ready urls=%s", ", ".join(server.root for server in self._answered))

    async def ensure_policy_on_all(self, policy: TargetPolicy, *, reset: bool = True) -> TargetPolicy:
        """Make every server serve `policy` and admit it. Called before the first rollout.

        The servers load the policy at the same time. A server that did not answer at the start is left out: `run` admits it later.

        Args:
            policy: becomes the target.
            reset: only for the start model. True: a server that serves another policy goes back to it. False: it is an error.

        Returns:
            `policy` with its digest.

        Raises:
            InferenceError: a server of `client.base_url` failed, or every server of `client.elastic`, or start models differ.
        """
        self._allow_wake()
        waiting = [server for server in self.servers.values() if server.is_admitted or server in self._answered]
        for server in waiting if policy.directory is None and not reset else ():
            status = await server.client.served_policy()
            if status.version != START_VERSION:
                raise InferenceError(
                    f"{server.root} holds policy {status.version} and the run starts from the base model; set "
                    "orchestrator.reload_weights_on_start = true"
                )
        errors: list[InferenceError] = []
        while waiting and policy.digest is None:  # the first server that serves the start model reports its digest
            policy, error = await self._load_and_admit(waiting.pop(0), policy)
            errors += [error] if error is not None else []
        loaded = await asyncio.gather(*(self._load_and_admit(server, policy) for server in waiting))
        errors += [error for _, error in loaded if error is not None]
        if errors and (self._config.elastic is None or not self.admitted):
            raise errors[0]
        return policy

    def _allow_wake(self) -> None:
        """Let servers take GPU memory again, and count the time without an admitted server from now."""
        if not self.may_wake.is_set():
            self._no_server_since = self._clock()
            self.may_wake.set()

    async def _load_and_admit(self, server: Server, policy: TargetPolicy) -> tuple[TargetPolicy, InferenceError | None]:
        """Return `policy` with the digest that the server reported, and None; or `policy` as it was and the error of the server."""
        try:
            status = await server.ensure_policy(policy)
        except InferenceError as exc:
            server.last_error = str(exc)
            return policy, exc
        policy = self.target = replace(policy, digest=status.digest)
        self.admit(server)
        return policy, None

    async def ensure_policy(self, policy: TargetPolicy) -> None:
        """Make the admitted servers serve `policy`, and return once at least one of them does.

        A server that fails, or takes much longer than most, is marked unhealthy: a lost node must not delay the others. A server
        that loaded the previous target too late to be admitted gets the same extra time to load this one, and then joins.

        Raises:
            PolicyRefused: every server refused the policy, for example because its directory is not whole.
            ForeignPolicy: a server reports another policy after loading this one.
        """
        self._previous_target, self.target = self.target, policy
        self._allow_wake()
        admitted = self.admitted
        errors = await self._ensure_on_most(admitted, policy)
        refusals = [error for error in errors if isinstance(error, PolicyRefused)]
        if admitted and len(refusals) == len(admitted):
            raise refusals[0]
        await self._has_admitted.wait()  # `ServerMonitor` bounds the wait

    async def sleep(self) -> None:
        """Make every server free its GPU memory. Until the next `ensure_policy` no server is admitted or woken.

        A server counts as done when it answers that it sleeps. After any other answer, or none, it may hold its memory, and it is
        asked again: a server of `client.base_url` that refuses connections may be starting, and takes memory before it listens.
        A server of `client.elastic` that refuses connections counts as done, because it need not come back. A stuck engine gives up
        and answers with an error after at most 1,200 s (`inference.policy_loader`: 600 s to pause, 600 s to sleep), which is more
        than `client.admin_timeout` allows for one answer. So the whole wait has the longer limit `client.wait_for_ready_timeout`,
        which is checked after all servers were asked once.

        Raises:
            InferenceError: a server was started without `inference.sleep_while_training`, or kept its memory for
                `client.wait_for_ready_timeout`.
        """
        self.may_wake.clear()
        timeout_s, begun, reported_at = self._config.wait_for_ready_timeout, self._clock(), float("-inf")
        for server in self.servers.values():
            server.is_asleep = False  # the server may have been started again since
        while True:
            awake = [server for server in self.servers.values() if not server.is_asleep]
            errors = [error for error in await asyncio.gather(*map(self._put_to_sleep, awake)) if error is not None]
            for error in errors:
                if isinstance(error, PolicyRefused):
                    raise InferenceError(
                        f"{key_name('orchestrator.sleep_servers')} = true, but {error}; start that server with "
                        f"{key_name('inference.sleep_while_training')} = true, or set "
                        f"{key_name('orchestrator.sleep_servers')} = false"
                    ) from error
            if not errors:
                return
            reasons, waited_s = "; ".join(map(str, errors)), self._clock() - begun
            if waited_s >= timeout_s:
                raise InferenceError(
                    "the batch was not sent, because a server may still hold GPU memory that the trainer needs: it does not "
                    f"sleep after {waited_s:.0f} s (client.wait_for_ready_timeout = {timeout_s:g}): {reasons}; see "
                    "logs/inference.stdout, and restart each server whose process has ended"
                )
            if self._clock() - reported_at >= _REPORT_INTERVAL_S:
                reported_at = self._clock()
                logger.warning("the batch waits for servers to free their GPU memory seconds=%.0f: %s", waited_s, reasons)
            await self._sleep(_RETRY_INTERVAL_S)

    async def _put_to_sleep(self, server: Server) -> InferenceError | None:
        """Ask the server to sleep. Return None when it holds no GPU memory, else the error after which it may still hold some."""
        try:
            async with server.change_lock:
                if self.servers.get(server.root) is server:  # else it was removed meanwhile, and its client closed
                    await server.client.sleep()
                    server.is_asleep = True
        except ServerGone as exc:
            self.mark_unhealthy(server, str(exc))
            return None if server.is_elastic else exc
        except InferenceError as exc:
            return exc
        return None

    def probe_metrics(self) -> dict[str, float]:
        """Return the metric `probe/mismatch`: the largest mismatch of an admitted server. Empty for a policy without a probe."""
        statuses = [server.status for server in self.admitted if server.status is not None]
        mismatches = [status.probe_mismatch for status in statuses if status.probe_mismatch is not None]
        return {"probe/mismatch": max(mismatches)} if mismatches else {}

    async def server_loads(self, *, does_limit: bool = False) -> list[ServerLoad]:
        """Return the load of each admitted server. A server that does not report it, or fails, is left out.

        Args:
            does_limit: from now on prefer other servers to one that has no capacity, until it has or fewer rollouts than now run.
        """
        servers = self.admitted
        requests = [server.client.server_load() for server in servers]
        results = await asyncio.gather(*requests, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, InferenceError):
                raise result
        loads = [(server, load) for server, load in zip(servers, results, strict=True) if isinstance(load, ServerLoad)]
        for server, load in loads if does_limit else ():
            server.note_load(load)
        return [load for _, load in loads]

    async def aclose(self) -> None:
        """Close every client. May be called again."""
        while self.servers:
            await self.servers.popitem()[1].client.aclose()

    async def _ensure_on_most(self, servers: list[Server], policy: TargetPolicy) -> list[InferenceError | None]:
        """Load `policy` on `servers` at the same time; mark servers that are much later than half of all as unhealthy.

        Return the results of the servers that ended in time: None for a success, else the error.
        """
        if not servers:
            return []
        begun, num_loaded = self._clock(), 0
        policies = await self._transfers.begin(servers, policy) if self._transfers is not None else {}
        loads = {
            asyncio.create_task(self._ensure_on(server, policies.get(server, policy)), name=f"load-{server.root}"): server
            for server in servers
        }
        try:
            for ended in asyncio.as_completed(loads):
                num_loaded += await ended is None
                if 2 * num_loaded >= len(servers):
                    break
            # Otherwise a server that is as fast as the others, but began later, would load every policy too late to be admitted.
            loads |= {
                asyncio.create_task(server.await_change(), name=f"join-{server.root}"): server
                for server in self.servers.values()
                if not server.is_admitted and server.status is not None and self._previous_target.is_served(server.status)
            }
            timeout_s = max(_LATE_LOAD_TIMEOUT_S, self._clock() - begun)
            done, late = await asyncio.wait(loads, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            errors = [task.result() for task in loads if task in done]
        finally:
            for task in loads:
                task.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
        for task in late:
            self.mark_unhealthy(loads[task], f"it did not load policy {policy.version} when half of the servers had")
        return errors

    async def _ensure_on(self, server: Server, policy: TargetPolicy) -> InferenceError | None:
        """Load `policy` on an admitted server. Return None, or the error for which the server was marked unhealthy."""
        try:
            await server.ensure_policy(policy, is_known_to_differ=True)
        except ForeignPolicy:
            raise
        except InferenceError as exc:
            self.mark_unhealthy(server, f"it did not load policy {policy.version}: {exc}")
            return exc
        if server.is_admitted:
            self.record_load(server, policy)
        return None
