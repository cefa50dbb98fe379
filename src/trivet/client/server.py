"""Defines one inference server of a run: its client, what is known of it, and how it is made to serve a policy."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from trivet.client.inference_client import InferenceClient
from trivet.errors import ForeignPolicy, InferenceError, InferenceTimeout
from trivet.wire.versions import START_VERSION, PolicyStatus, PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPolicy:
    """The policy that servers should serve."""

    version: PolicyVersion
    digest: str | None
    """None: the start model's, which is known once a server has reported it."""
    directory: Path | None
    """None: the start model."""

    def is_served(self, status: PolicyStatus) -> bool:
        """Return whether `status` is of this policy; without a digest, of any with its version."""
        return status.version == self.version and self.digest in (None, status.digest)


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """One server: its client, and what is known of it."""

    client: InferenceClient
    is_elastic: bool = False
    """It was found by `client.elastic`: it may go, and not come back."""
    is_admitted: bool = False
    """Rollouts go there."""
    is_loading: bool = False
    is_asleep: bool = False
    """True from the server's answer that it has freed its GPU memory until it is asked for a policy."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the server is put to sleep, and while it loads the policy with which it can be admitted."""
    num_loads: int = 0
    num_in_flight: int = 0
    """Rollouts that were sent there and did not end."""
    num_timeouts: int = 0
    """Questions in a row that it did not answer in time."""
    num_attempts: int = 0
    """Tries to admit it since it was marked unhealthy, or since the start."""
    status: PolicyStatus | None = None
    """Its answer when it was last made to serve a policy."""
    last_error: str = "was never asked"
    probed_at: float = float("-inf")
    """When the last probe that it answered began."""
    probing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def root(self) -> str:
        """The server's address, without `/v1`."""
        return self.client.base_url

    async def ensure_policy(self, policy: TargetPolicy, *, is_known_to_differ: bool = False) -> PolicyStatus:
        """Have the server serve `policy`, and prove it by its digest.

        Args:
            is_known_to_differ: skip the question which policy it serves.

        Raises:
            InferenceError: it failed, or did not answer in time.
            ForeignPolicy: it serves something else right after loading.
        """
        self.is_loading, self.is_asleep = True, False
        try:
            if not is_known_to_differ:
                status = await self.client.served_policy()
                if policy.is_served(status) and not status.asleep:
                    self.status = status
                    return status
            if policy.directory is None:
                status = await self.client.reload_weights()
            else:
                status = await self.client.update_weights(policy.directory)
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

    async def probe(self, policy: TargetPolicy, *, now: float, timeout_s: float, max_timeouts: int) -> str | None:
        """Ask an admitted server which policy it serves.

        Returns:
            Why it is unhealthy, or None.

        Raises:
            ForeignPolicy: it serves a policy that this run did not give it.
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
        self.probed_at = now
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
