"""Follows published policies: decides which one the servers should hold, has them load it, and tells who waits for it.

Consumes `weights/step_N` with STABLE. Produces loads on every server, a reader's acknowledgement and a Load event. Waits by
polling the shared directory, the one channel that works across machines.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from trivet.algorithms.staleness import required_version, target_version
from trivet.client.inference_client import InferenceClient, PolicyStatus
from trivet.config.layout import RunLayout
from trivet.errors import InferenceError, WaitTimeout
from trivet.weights.catalog import latest_version, published_versions
from trivet.weights.manifest import read_manifest
from trivet.weights.retention import acknowledge
from trivet.wire.events import Event, Load
from trivet.wire.versions import START_VERSION, PolicyVersion, Step

logger = logging.getLogger(__name__)

READER = "orchestrator"
_POLL_S = 0.1


class PolicyWatcher:
    def __init__(
        self,
        *,
        layout: RunLayout,
        servers: Sequence[InferenceClient],
        max_async_level: int,
        is_strict: bool,
        timeout_s: float,
        write_event: Callable[[Event], None],
        on_load: Callable[[PolicyVersion], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            timeout_s: longest time without a policy that the batch being filled requires.
            on_load: called once every server holds a new policy.
        """
        self._layout = layout
        self._servers = servers
        self._max_async_level = max_async_level
        self._is_strict = is_strict
        self._timeout_s = timeout_s
        self._write_event = write_event
        self._on_load = on_load
        self._clock = clock
        self.step = Step(1)
        """The batch being filled."""
        self.version = START_VERSION
        """What every server holds."""
        self.last_load_s = 0.0

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            WaitTimeout: the trainer published nothing that the batch being filled could start from.
            InferenceError: a server refused or failed a load.
        """
        waiting_since = self._clock()
        while True:
            latest = latest_version(self._layout) or START_VERSION
            target = target_version(
                step=self.step, latest=latest, max_async_level=self._max_async_level, is_strict=self._is_strict
            )
            if self.version < target <= latest:
                await self.load(target)
            required = required_version(step=self.step, max_async_level=self._max_async_level)
            if self.version >= required:
                waiting_since = self._clock()
            elif self._clock() - waiting_since > self._timeout_s:
                raise WaitTimeout(
                    f"orchestrator waited {self._timeout_s:.0f} s for policy {required} to fill batch {self.step}; the newest "
                    f"in {self._layout.weights} is {latest}: is the trainer alive (logs/trainer.stdout)?"
                )
            await asyncio.sleep(_POLL_S)

    async def await_policy(self, version: PolicyVersion) -> None:
        """Wait until the trainer has published `version` (again, after a resume), then have every server load it.

        Raises:
            WaitTimeout: it did not appear.
        """
        deadline = self._clock() + self._timeout_s
        while version not in published_versions(self._layout):
            if self._clock() > deadline:
                raise WaitTimeout(
                    f"orchestrator waited {self._timeout_s:.0f} s for {self._layout.weights_step(version)} to resume from: "
                    "is the trainer alive (logs/trainer.stdout)?"
                )
            await asyncio.sleep(_POLL_S)
        await self.load(version)

    async def load(self, version: PolicyVersion) -> None:
        """Have every server load `version` and prove by its digest that it did."""
        directory = self._layout.weights_step(version)
        expected = read_manifest(directory)
        started = self._clock()
        statuses = await asyncio.gather(*(server.update_weights(directory) for server in self._servers))
        for server, status in zip(self._servers, statuses, strict=True):
            _check(server, status, version=version, digest=expected.digest)
            self._write_event(Load(version=version, digest=status.digest, server=server.base_url))
        self.last_load_s = self._clock() - started
        acknowledge(self._layout, READER, version)
        self.version = version
        logger.info("policy loaded version=%s seconds=%.2f", version, self.last_load_s)
        self._on_load(version)

    async def start_from_base(self, *, reload: bool) -> None:
        """Start from version 0.

        Args:
            reload: have the servers go back to the start weights, whatever they hold; else they must hold them already.
        """
        for server in self._servers:
            status = await (server.reload_weights() if reload else server.policy())
            if status.version != START_VERSION:
                raise InferenceError(
                    f"{server.base_url} holds policy {status.version} and the run starts from the base model; set "
                    "orchestrator.reload_weights_on_start = true"
                )
            self._write_event(Load(version=status.version, digest=status.digest, server=server.base_url))
        acknowledge(self._layout, READER, START_VERSION)
        self.version = START_VERSION
        self._on_load(START_VERSION)


def _check(server: InferenceClient, status: PolicyStatus, *, version: PolicyVersion, digest: str) -> None:
    if status.version != version or status.digest != digest:
        raise InferenceError(
            f"{server.base_url} reports policy {status.version} with digest {status.digest[:12]} after loading policy "
            f"{version} with digest {digest[:12]}: another run may use the same server"
        )
