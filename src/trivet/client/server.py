"""Defines one inference server of a run: its client and its last known state. Loads a policy on it and checks which it serves."""

import asyncio
import math
from dataclasses import dataclass, field
from pathlib import Path

from trivet.client.inference_client import InferenceClient
from trivet.client.server_load import ServerLoad
from trivet.errors import ForeignPolicy, InferenceError, InferenceTimeout
from trivet.wire.versions import START_VERSION, FetchablePolicy, PolicyStatus, PolicyVersion, TransferRound


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPolicy:
    """A policy that servers should serve."""

    version: PolicyVersion
    digest: str | None
    """Digest of the policy's manifest. None for the start model until a server has reported its digest."""
    directory: Path | None
    """The directory of the published policy; None for the start model."""
    offer: FetchablePolicy | None = None
    """The same policy for a server that should fetch it; None if servers read `directory`."""
    transfer: TransferRound | None = None
    """The round in which the trainer sends the policy to one server; None: the server reads its files."""

    def is_served(self, status: PolicyStatus) -> bool:
        """Return whether a server with `status` serves this policy. If the digest is None, only the version is compared."""
        return status.version == self.version and self.digest in (None, status.digest)


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """The client and the last known state of one inference server."""

    client: InferenceClient
    is_elastic: bool = False
    """True for a server that `client.elastic` found: it may go away for good."""
    is_admitted: bool = False
    """True while the server gets rollouts."""
    is_loading: bool = False
    is_asleep: bool = False
    """True from the server's answer that it has freed its GPU memory until the next request to serve a policy."""
    change_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the server is put to sleep, and while it loads the policy with which it can be admitted."""
    num_loads: int = 0
    """Finished calls of `ensure_policy`. A check compares the number before and after, to notice a load in between."""
    num_in_flight: int = 0
    """Rollouts that were sent to the server and have not ended."""
    capacity: float = math.inf
    """Rollouts that the server computed when its load was last read and it was full. Infinite for any other server."""
    num_timeouts: int = 0
    """Checks in a row that the server did not answer in time."""
    num_attempts: int = 0
    """Times in a row that it was there and did not load the target policy."""
    status: PolicyStatus | None = None
    """The server's answer when it last served the policy that it was asked for. None before that, and once it is unhealthy."""
    last_error: str = "was never asked"
    checked_at: float = float("-inf")
    """Monotonic seconds at which the last check that the server answered began."""
    check_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a check, so that groups that fail at the same time wait for one check."""

    @property
    def root(self) -> str:
        """The server's address, without `/v1`."""
        return self.client.base_url

    @property
    def is_full(self) -> bool:
        """True while the server has as many rollouts as its last load allows."""
        return self.num_in_flight >= self.capacity

    def note_load(self, load: ServerLoad) -> None:
        """Set the rollouts that the server can have: no limit while it has capacity, else as many as run now."""
        self.capacity = math.inf if load.has_capacity else self.num_in_flight - load.num_waiting

    async def ensure_policy(self, policy: TargetPolicy, *, is_known_to_differ: bool = False) -> PolicyStatus:
        """Make the server serve `policy`, and verify the digest that it reports. Return its status.

        Args:
            is_known_to_differ: the server serves another policy, so it need not be asked which.

        Raises:
            InferenceError: the server failed, or did not answer in time.
            ForeignPolicy: the server reports another policy right after loading.
        """
        self.is_loading, self.is_asleep = True, False
        try:
            if not is_known_to_differ:
                status = await self.client.served_policy()
                if policy.is_served(status) and not status.asleep:
                    self.status = status
                    return status
            if policy.offer is not None:
                status = await self.client.fetch_weights(policy.offer)
            elif policy.directory is None:
                status = await self.client.reload_weights()
            else:
                status = await self.client.update_weights(policy.directory, transfer=policy.transfer)
        finally:
            self.is_loading = False
            self.num_loads += 1
        if not policy.is_served(status):
            raise ForeignPolicy(
                f"{self.root} reports policy {status.version} with digest {status.digest[:12]} after loading policy "
                f"{policy.version} with digest {(policy.digest or 'unknown')[:12]}: another run may use the same server, or it "
                "serves another start model"
            )
        self.status = status
        return status

    async def await_change(self) -> None:
        """Wait while the server is put to sleep, or loads the policy with which it can be admitted."""
        async with self.change_lock:
            pass

    async def find_problem(self, policy: TargetPolicy, *, now: float, timeout_s: float, max_timeouts: int) -> str | None:
        """Ask an admitted server which policy it serves.

        Args:
            policy: the policy that it should serve.
            now: monotonic seconds.
            max_timeouts: checks in a row without an answer that make it unhealthy.

        Returns:
            The reason why the server is unhealthy; None while it counts as healthy.

        Raises:
            ForeignPolicy: the server serves a policy that this run did not load there.
        """
        num_loads, was_loading, was_asleep = self.num_loads, self.is_loading, self.is_asleep
        try:
            status = await self.client.served_policy(timeout_s=timeout_s)
        except InferenceTimeout as exc:
            self.num_timeouts += not was_loading
            self.last_error = str(exc)
            return f"{exc}, {self.num_timeouts} times in a row" if self.num_timeouts >= max_timeouts else None
        except InferenceError as exc:
            return str(exc)
        self.num_timeouts = 0
        self.checked_at = now
        if was_asleep and self.is_asleep and not status.asleep:
            return "it does not sleep any more, because it was started again"
        if was_loading or self.is_loading or num_loads != self.num_loads or policy.is_served(status):
            return None
        if status.version == START_VERSION:
            return f"it holds the start model, not policy {policy.version}: it was started again"
        raise ForeignPolicy(
            f"{self.root} serves policy {status.version} with digest {status.digest[:12]}, and this run had it load policy "
            f"{policy.version} with digest {(policy.digest or '')[:12]}: another run uses the same server; give each its own"
        )
