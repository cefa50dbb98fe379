"""Connects the command `eval` to its servers, makes them serve the policy to evaluate, and restores their earlier policies.

Trivet servers load every policy that is evaluated; at the end they load the policy that they served before. Any other
OpenAI-compatible server is "plain": it is evaluated with the model that it serves, as the base. Nothing here writes files.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from trivet.client.inference_client import InferenceClient
from trivet.client.server import Server, TargetPolicy
from trivet.client.server_pool import ServerPool
from trivet.config.layout import SECRET_FILE, RunLayout
from trivet.config.resolve import LOCAL_HOSTS
from trivet.config.schema.inference import ClientConfig
from trivet.config.schema.shared import DEFAULT_OUTPUT_DIR
from trivet.errors import ConfigError, InferenceError, WeightsError
from trivet.evaluation.targets import PolicyOrigin, Target, complete_steps
from trivet.process.lock import holder_of
from trivet.process.proxies import is_direct
from trivet.secret import find_secret
from trivet.weights.manifest import offer_policy
from trivet.wire.groups import server_root
from trivet.wire.versions import START_VERSION, PolicyStatus

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.5
_ORIGIN_TIMEOUT_S = 5.0
_REPORT_INTERVAL_S = 10.0
"""Seconds between two log lines about a server that does not answer yet."""
_START_POLICY = TargetPolicy(version=START_VERSION, digest=None, directory=None)
PLAIN_DIGEST = "unknown"
"""The digest that is recorded for the weights of a plain server, which reports none."""


async def connect(
    config: ClientConfig, *, environ: Mapping[str, str], weights_dir: Path | None, weights_url: str | None = None
) -> "EvalServers":
    """Connect to the servers of `config`, all of which must answer.

    Args:
        weights_dir: has the published policies. It must have the policy that a server serves now, so that it can be restored.
        weights_url: the address of the origin that serves them. If nothing answers there, servers read `weights_dir`.

    Raises:
        ConfigError: a server does not answer, trivet and plain servers are mixed, or a server's policy could not be restored.
    """

    def find_token() -> str | None:
        layout = RunLayout(weights_dir.parent if weights_dir is not None else DEFAULT_OUTPUT_DIR)
        has_secret = SECRET_FILE in environ or layout.secret.exists()
        return find_secret(layout, environ=environ).token if has_secret else None

    def make_client(url: str) -> InferenceClient:
        return InferenceClient(
            url,
            timeout_s=config.admin_timeout,
            find_token=find_token,
            headers=config.request_headers(url, environ),
            is_direct=is_direct(url, environ),
        )

    clients = [make_client(url) for url in config.base_url] if config.elastic is None else []
    async with AsyncExitStack() as to_close:  # on an error; `pop_all` empties it on success
        for client in clients:
            to_close.push_async_callback(client.aclose)
        deadline = time.monotonic() + config.wait_for_ready_timeout
        is_trivet = {client: await _is_trivet_server(client, config, deadline=deadline) for client in clients}
        trivet_urls = ", ".join(client.base_url for client in clients if is_trivet[client])
        plain_urls = ", ".join(client.base_url for client in clients if not is_trivet[client])
        if trivet_urls and plain_urls:
            raise ConfigError(
                f"client.base_url names trivet servers ({trivet_urls}) and others ({plain_urls}), which cannot serve the same "
                "policy; name one kind"
            )
        if plain_urls:
            to_close.pop_all()
            return PlainServers(clients)
        origin = weights_url if weights_url is not None and await _is_up(make_client(weights_url)) else None
        pool = ServerPool(config, make_client=make_client, write_event=lambda event: None, origin=origin)
        to_close.push_async_callback(pool.aclose)
        try:
            earlier_policies = {
                client: _find_restorable_policy(client, await client.served_policy(), weights_dir, sources=pool.sources)
                for client in clients
            }
            await pool.start()
        except InferenceError as exc:
            raise ConfigError(str(exc)) from exc
        to_close.pop_all()
        return TrivetServers(placement=pool, earlier_policies=earlier_policies)


@dataclass(slots=True, kw_only=True)
class TrivetServers:
    """Servers that were started with `uv run inference`. They report the policy of each token, and load policies."""

    placement: ServerPool
    """Chooses the server of a group. It was started."""
    earlier_policies: Mapping[InferenceClient, TargetPolicy]
    """The policy that each server of `client.base_url` served before, to restore at the end. Empty with `client.elastic`."""
    is_plain: ClassVar[bool] = False
    _served: TargetPolicy | None = None
    """The policy that the servers serve; None before the first `ensure_policy`."""

    async def model_names(self) -> list[str]:
        """Return the names that requests may give as their model; none with `client.elastic`."""
        client = next(iter(self.earlier_policies), None)
        return await client.model_names() if client is not None else []

    async def ensure_policy(self, target: Target) -> str:
        """Make every server serve `target`; return the digest of its weights.

        The first policy, and the start model, must be loaded by all servers. A server that fails to load a later policy is marked
        unhealthy, and the others go on.

        Raises:
            InferenceError: no server can serve it.
        """
        policy = _START_POLICY
        if target.directory is not None:
            policy = _read_published_policy(target.directory, sources=self.placement.sources)
        served = self._served
        if served is None or policy.directory is None:
            self._served = await self.placement.ensure_policy_on_all(policy)
        elif (served.version, served.digest) != (policy.version, policy.digest):
            await self.placement.ensure_policy(policy)
            self._served = policy
        assert self._served is not None
        mismatch = self.placement.probe_metrics().get("probe/mismatch")
        comparison = "has no probe to reproduce" if mismatch is None else f"is reproduced: probe mismatch {mismatch:.3g} nats"
        logger.info("policy %s %s", policy.version, comparison)
        return self._served.digest or ""

    async def run(self) -> None:
        """Watch the servers, until cancelled.

        Raises:
            InferenceError: no server was admitted for longer than `client.wait_for_ready_timeout`.
        """
        await self.placement.run()

    async def aclose(self) -> None:
        """Restore the policy that each server served before. May be called again."""
        earlier_policies, self.earlier_policies = self.earlier_policies, {}
        for client, policy in earlier_policies.items():
            try:
                await Server(client=client).ensure_policy(policy)
            except InferenceError as exc:
                logger.warning("policy %s of %s could not be restored: %s", policy.version, client.base_url, exc)
            await client.aclose()
        if not earlier_policies and self.placement.roots:  # the servers of `client.elastic` go back to the start model
            await self.placement.ensure_policy_on_all(_START_POLICY)
        await self.placement.aclose()


class PlainServers:
    """OpenAI-compatible servers that are not trivet servers. They answer with text, without token ids, and load no policy."""

    is_plain = True

    def __init__(self, clients: list[InferenceClient]) -> None:
        self._clients = clients
        self.placement = self
        self._in_flight: Counter[str] = Counter()

    async def model_names(self) -> list[str]:
        """Return the names that the first server lists."""
        return await self._clients[0].model_names()

    async def ensure_policy(self, target: Target) -> str:
        """Accept the start model alone.

        Raises:
            ConfigError: `target` has weights to load.
        """
        if target.directory is not None:
            raise ConfigError(
                f"{self._clients[0].base_url} is not `uv run inference` and loads no weights: it can be evaluated as it is, "
                "without --weights-dir; to evaluate steps start `uv run inference` with the base model"
            )
        return PLAIN_DIGEST

    async def run(self) -> None:
        """Wait until cancelled."""
        await asyncio.Event().wait()  # such servers cannot be watched

    def pick(self, *, num_rollouts: int) -> str | None:
        """Return the address of the server with the fewest rollouts in flight, and count `num_rollouts` more there."""
        client = min(self._clients, key=lambda client: self._in_flight[client.base_url])
        self._in_flight[client.base_url] += num_rollouts
        return client.base_url

    def release(self, root: str, *, num_rollouts: int) -> None:
        """Stop counting rollouts that `pick` counted."""
        self._in_flight[root] -= num_rollouts

    async def is_at_fault(self, root: str) -> bool:
        """Return False, because nothing but its answers shows the state of such a server."""
        return False

    async def aclose(self) -> None:
        """Close the connections. May be called again."""
        clients, self._clients = self._clients, []
        for client in clients:
            await client.aclose()


EvalServers = TrivetServers | PlainServers


def require_free_servers(client: ClientConfig, origin: PolicyOrigin, weights_dir: Path | None) -> None:
    """Check that no live run generates with a server of `client`.

    Raises:
        ConfigError: a live run generates with one of the servers, which must not lose its policy.
    """
    if weights_dir is None or holder_of(RunLayout(weights_dir.absolute().parent).lock) is None:
        return

    def address_of(url: str) -> tuple[str | None, int | None]:
        """Return host and port, with one name for this machine, which has several."""
        parts = urlsplit(server_root(url))
        return "localhost" if parts.hostname in LOCAL_HOSTS else parts.hostname, parts.port

    for url in client.base_url:
        if address_of(url) in map(address_of, origin.server_roots):
            raise ConfigError(
                f"the run in {weights_dir.parent} is going on and generates with {url}: loading other weights there would end it; "
                "evaluate on a server of your own (client.base_url), or let the run evaluate itself ([orchestrator.eval])"
            )


async def _is_trivet_server(client: InferenceClient, config: ClientConfig, *, deadline: float) -> bool:
    """Wait until the server answers; return whether it is a trivet server."""
    reported_at = float("-inf")
    while True:
        try:
            return await client.serves_policies(timeout_s=max(deadline - time.monotonic(), _POLL_INTERVAL_S))
        except InferenceError as exc:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"no server answers at {client.base_url} after {config.wait_for_ready_timeout:g} s "
                    f"(client.wait_for_ready_timeout): {exc}; start one with `uv run inference @ inference.toml`, or set "
                    "client.base_url to where it is"
                ) from exc
            if time.monotonic() - reported_at >= _REPORT_INTERVAL_S:
                reported_at = time.monotonic()
                logger.info("waiting for %s, at most %.0f s: %s", client.base_url, max(deadline - time.monotonic(), 0), exc)
        await asyncio.sleep(_POLL_INTERVAL_S)


async def _is_up(client: InferenceClient) -> bool:
    """Return whether the server at the address of `client`, which is closed, answers."""
    try:
        await client.check_health(timeout_s=_ORIGIN_TIMEOUT_S)
    except InferenceError:
        return False
    finally:
        await client.aclose()
    return True


def _find_restorable_policy(
    client: InferenceClient, status: PolicyStatus, weights_dir: Path | None, *, sources: Sequence[str]
) -> TargetPolicy:
    """Return the policy that a server serves now, with the directory from which it can be restored."""
    if status.version == START_VERSION:
        return TargetPolicy(version=status.version, digest=status.digest, directory=None)
    directory = complete_steps(weights_dir).get(status.version) if weights_dir is not None else None
    policy = _read_published_policy(directory, sources=sources) if directory is not None else None
    if policy is None or policy.digest != status.digest:
        raise ConfigError(
            f"{client.base_url} serves policy {status.version} with digest {status.digest[:12]}, which is not in "
            f"{weights_dir or 'any weights_dir'}, so it could not be restored afterwards: another run may use this server. "
            f"Evaluate on one of your own, or have it go back to its start weights: curl -X POST -H "
            f'"Authorization: Bearer $(cat .secret)" {client.base_url}/reload_weights, with .secret in the server\'s output_dir'
        )
    return policy


def _read_published_policy(directory: Path, *, sources: Sequence[str]) -> TargetPolicy:
    """Return the policy published in `directory`, by its manifest."""
    try:
        offer = offer_policy(directory, sources=sources)
    except WeightsError as exc:
        raise ConfigError(str(exc)) from exc
    return TargetPolicy(version=offer.version, digest=offer.digest, directory=directory, offer=offer if sources else None)
