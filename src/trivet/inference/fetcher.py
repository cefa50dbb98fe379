"""Fetches policies into this machine's cache while the engine generates, and then loads them. Called by POST /update_weights."""

import asyncio
import os
import tempfile
from pathlib import Path

from trivet.config.schema.inference import InferenceConfig
from trivet.inference.policy_loader import PolicyLoader
from trivet.secret import RunSecret
from trivet.weights.fetch import PolicyCache
from trivet.wire.versions import FetchablePolicy

_ANSWER_INTERVAL_S = 10.0
"""Longest time for one request to wait for a fetch. It is shorter than any time limit of a client."""


class PolicyFetcher:
    """Fetches one policy at a time. A request for another policy ends the fetch under way."""

    def __init__(self, loader: PolicyLoader, cache: PolicyCache) -> None:
        self._loader = loader
        self._cache = cache
        self._policy: FetchablePolicy | None = None
        self._fetch: asyncio.Task[Path] | None = None
        """The fetch of `_policy`; None once a request has got its result."""

    async def load(self, policy: FetchablePolicy) -> None:
        """Serve `policy`. If it is still being fetched when this returns (`is_fetching`), ask again.

        Raises:
            FetchFailed: it could not be fetched now.
            WeightsError, InferenceError: see `PolicyLoader.load`.
        """
        if self._fetch is None or self._policy is None or self._policy.manifest_sha256 != policy.manifest_sha256:
            fetching = asyncio.to_thread(self._cache.fetch, policy, max_bytes=self._loader.max_bytes)
            self._policy, self._fetch = policy, asyncio.create_task(fetching, name=f"fetch-{policy.version}")
            self._fetch.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # a later request may not ask for it
        fetch = self._fetch
        await asyncio.wait({fetch}, timeout=_ANSWER_INTERVAL_S)
        if not fetch.done():
            return
        if self._fetch is fetch:
            self._fetch = None
        directory = fetch.result()
        await self._loader.load(directory, is_verified=True)
        self._cache.settle(directory)

    @property
    def is_fetching(self) -> bool:
        """True while a policy is being fetched."""
        return self._fetch is not None


def make_cache(config: InferenceConfig, secret: RunSecret) -> PolicyCache:
    """Return the cache of policies that servers of this machine fetch. Nothing is made before the first fetch."""
    return PolicyCache(
        (config.weight_cache or Path(tempfile.gettempdir())) / f"trivet_weights_{os.getuid()}",
        run=secret.derive("weight cache").hex()[:16],
        token=secret.token,
        environ=os.environ,
    )
