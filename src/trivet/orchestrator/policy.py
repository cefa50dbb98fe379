"""Follows published policies: decides which one the servers should serve, and makes them load it.

consumes: `weights/step_N` with STABLE
produces: loads on the servers, and the acknowledgement of the policy, after which older policies may be removed
waits for: a new policy, by polling the shared directory, which works across machines
unblocked by: the clock

While an evaluation pins the policy, nothing is loaded.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from trivet.algorithms.dispatching import required_version, target_version
from trivet.client.server import TargetPolicy
from trivet.client.server_pool import ServerPool
from trivet.config.layout import STABLE, RunLayout
from trivet.errors import WaitTimeout, WeightsError
from trivet.storage.durable import is_listed
from trivet.telemetry import process_report
from trivet.weights.catalog import latest_version
from trivet.weights.manifest import offer_policy, verify
from trivet.weights.retention import acknowledge
from trivet.wire.versions import START_VERSION, PolicyVersion, Step

logger = logging.getLogger(__name__)

READER = "orchestrator"
"""Name under which the orchestrator acknowledges policies."""
_POLL_INTERVAL_S = 0.1
"""Seconds between two reads of the shared directory: a new policy waits half of it on average."""


class PolicyWatcher:
    """Makes the servers serve the policy that the batch being filled should be sampled from."""

    def __init__(
        self,
        *,
        layout: RunLayout,
        servers: ServerPool,
        max_async_level: int,
        is_strict: bool,
        timeout_s: float,
        on_policy_served: Callable[[PolicyVersion], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Make a watcher of servers that serve the start model.

        Args:
            is_strict: load exactly the oldest policy that the batch may be sampled from, not a newer one.
            timeout_s: longest time to wait for a policy that the batch being filled requires.
            on_policy_served: called with the version once the servers serve a new policy.
        """
        self._layout = layout
        self._servers = servers
        self._max_async_level = max_async_level
        self._is_strict = is_strict
        self._timeout_s = timeout_s
        self._on_policy_served = [on_policy_served]
        self._clock = clock
        self._sleep = sleep
        self._num_pins = 0
        self._loading = asyncio.Lock()
        self.step = Step(1)
        """The batch being filled."""
        self.version = START_VERSION
        """The policy that was loaded last. While the next load is under way, some servers serve a newer one already."""
        self.digest = ""
        """Digest of the weights of `version`."""
        self.last_load_s = 0.0
        """Seconds that the last load took."""

    def subscribe(self, on_policy_served: Callable[[PolicyVersion], None]) -> None:
        """Call `on_policy_served` too once the servers serve a new policy."""
        self._on_policy_served.append(on_policy_served)

    async def run(self) -> None:
        """Load each policy that the batch being filled should have, until cancelled.

        Raises:
            WaitTimeout: a policy that the batch requires was not published within the timeout.
        """
        waited_s, checked_at = 0.0, self._clock()
        while True:
            required = required_version(step=self.step, max_async_level=self._max_async_level)
            latest = latest_version(self._layout) or START_VERSION
            if self.version >= required:
                if waited_s:
                    process_report.begin(f"filling batch {self.step}")
                waited_s = 0.0
            elif latest < required:  # a policy that is published and only waits for a pin does not count
                if not waited_s:
                    process_report.begin_waiting(f"policy {required}", on="trainer")
                waited_s += self._clock() - checked_at
            checked_at = self._clock()
            if waited_s > self._timeout_s:
                raise WaitTimeout(
                    f"orchestrator waited {self._timeout_s:.0f} s for policy {required} to fill batch {self.step}; the newest "
                    f"in {self._layout.weights} is {latest}: is the trainer alive (logs/trainer.stdout)?"
                )
            target = target_version(
                step=self.step, latest=latest, max_async_level=self._max_async_level, is_strict=self._is_strict
            )
            if self.version < target <= latest and not self._num_pins:
                await self.ensure_policy(target)
            await self._sleep(_POLL_INTERVAL_S)

    @asynccontextmanager
    async def pinned(self) -> AsyncGenerator[PolicyVersion, None]:
        """Load no policy within the block; a load in progress is awaited first. Yield the version that the servers serve.

        Blocks may nest and overlap: loading continues when the last has ended. A server that comes back meanwhile gets the pinned
        policy. Rollouts for training continue as long as the pinned policy is recent enough for them.
        """
        async with self._loading:
            self._num_pins += 1
        try:
            yield self.version
        finally:
            self._num_pins -= 1

    async def await_policy(self, version: PolicyVersion) -> None:
        """Wait until the trainer has published `version`, then make every server load it.

        After a resume the policy is there already, unless it is damaged: then the trainer publishes it again.
        """
        deadline = self._clock() + self._timeout_s
        directory = self._layout.weights_step(version)
        damaged_at = (
            0  # modification time of STABLE of the damaged policy, in ns: it changes when the policy is published again
        )
        while True:
            with suppress(FileNotFoundError):
                if is_listed(directory) and (published_at := (directory / STABLE).stat().st_mtime_ns) != damaged_at:
                    try:
                        await asyncio.to_thread(verify, directory)
                        break
                    except WeightsError as exc:
                        logger.warning("waiting for the trainer to publish the policy again: %s", exc)
                        damaged_at = published_at
            if self._clock() > deadline:
                raise WaitTimeout(
                    f"orchestrator waited {self._timeout_s:.0f} s for {directory} to resume from: is the trainer alive "
                    "(logs/trainer.stdout)?"
                )
            await self._sleep(_POLL_INTERVAL_S)
        self._set_served(await self._servers.ensure_policy_on_all(self._published(version)))

    async def start_from_base(self, *, reload: bool) -> None:
        """Make version 0, the start model, the served policy.

        Args:
            reload: make servers that serve another policy load the start weights; if False, such servers are an error.
        """
        start = TargetPolicy(version=START_VERSION, digest=None, directory=None)
        self._set_served(await self._servers.ensure_policy_on_all(start, reset=reload))

    async def ensure_policy(self, version: PolicyVersion) -> None:
        """Make the servers load the published `version`, unless the served policy was pinned meanwhile."""
        async with self._loading:
            if self._num_pins:
                return
            started = self._clock()
            policy = self._published(version)
            await self._servers.ensure_policy(policy)
            self.last_load_s = self._clock() - started
        self._set_served(policy)
        logger.info("policy loaded version=%s seconds=%.2f", version, self.last_load_s)

    def _published(self, version: PolicyVersion) -> TargetPolicy:
        directory = self._layout.weights_step(version)
        offer = offer_policy(directory, sources=self._servers.sources)
        return TargetPolicy(version=version, digest=offer.digest, directory=directory, offer=offer if offer.sources else None)

    def _set_served(self, policy: TargetPolicy) -> None:
        """Record that the servers serve `policy`: acknowledge it and notify the subscribers."""
        acknowledge(self._layout, READER, policy.version)
        self.version, self.digest = policy.version, policy.digest or ""
        for notify in self._on_policy_served:
            notify(policy.version)
