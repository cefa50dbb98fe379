"""Brings a policy into the engine: one at a time, whole or not at all. Called by the routes."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from trivet.errors import InferenceError, WeightsError
from trivet.faults import reach
from trivet.inference.policy_ledger import PolicyLedger
from trivet.inference.weight_roots import require_below
from trivet.weights.adapters import base_of, is_adapter, is_same_model
from trivet.weights.manifest import Manifest, describe_start_model, verify

logger = logging.getLogger(__name__)

_MAX_GROWTH = 4
"""A policy is as large as the start model, or twice as large when the trainer's dtype is wider. What claims to be more is not read:
a sparse file of any size costs whoever wrote it nothing, and every later load waits for this one."""
_MAX_EXTRA_BYTES = 1 << 30
"""Tokenizer and the like, and adapters beside a tiny model."""


class Engine(Protocol):
    """What a load needs of the engine. Adapter: `versioned_engine.VersionedEngine`."""

    ledger: PolicyLedger

    async def pause(self) -> None:
        """Returns when no token is being sampled and none will be."""
        ...

    @property
    def serves_adapters(self) -> bool: ...

    async def load(self, directory: Path) -> None:
        """Put the weights of `directory` in place of the served ones, without an adapter."""
        ...

    async def load_adapter(self, directory: Path | None) -> None:
        """Put the adapter in `directory` in place of the policy's; None: serve the weights alone."""
        ...

    async def forget(self) -> None:
        """Drop what was computed with the weights before and would be used again."""
        ...

    async def resume(self) -> None: ...


class PolicyLoader:
    """
    >>> loader = PolicyLoader(engine, model_name=name, start_directory=directory, roots=[weights], on_broken=stop)
    >>> await loader.prepare()
    >>> await loader.load(Path("outputs/weights/step_7"))
    >>> loader.policy.version
    7
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model_name: str,
        start_directory: Path,
        roots: Sequence[Path],
        on_broken: Callable[[], None],
        timeout_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            model_name: what adapters must name as their base.
            start_directory: where the start model's files lie.
            roots: directories below which policies may be loaded from.
            on_broken: called when the engine holds neither the new weights nor the ones before; it stays paused.
            timeout_s: longest time for the engine to pause, and for it to load.
        """
        self._engine = engine
        self._model_name = model_name
        self._start_directory = start_directory
        self._roots = roots
        self._on_broken = on_broken
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._directory = start_directory
        self._whole: Path | None = start_directory
        """Whose weights the engine has, an adapter aside; None after a failed load."""
        self._start: Manifest | None = None
        self._policy: Manifest | None = None

    async def prepare(self) -> None:
        """Before anything is served: version 0 and its digest, which takes reading all of the start model."""
        self._start = self._policy = await asyncio.to_thread(describe_start_model, self._start_directory)
        if self._engine.serves_adapters:
            await self._engine.load_adapter(None)

    @property
    def policy(self) -> Manifest:
        """What is served now."""
        assert self._policy is not None
        return self._policy

    async def load(self, directory: Path) -> Manifest:
        """
        Raises:
            WeightsError: `directory` is elsewhere, much larger than the start model or not whole, or an adapter that cannot be
                served here; the policy before is still served, undisturbed.
            InferenceError: the engine could not load it; the policy before is served again.
        """
        assert self._start is not None
        require_below(self._roots, directory)
        limit = _MAX_GROWTH * self._start.num_bytes + _MAX_EXTRA_BYTES
        async with self._lock:
            manifest = await asyncio.to_thread(verify, directory, max_bytes=limit)
            if is_adapter(directory):
                self._require_servable(directory)
            reach("reload.before", step=manifest.version)
            await self._switch(directory, manifest)
            reach("reload.after", step=manifest.version)
            return manifest

    async def load_start(self) -> Manifest:
        """Back to the start weights, version 0."""
        assert self._start is not None
        async with self._lock:
            await self._switch(self._start_directory, self._start)
            return self._start

    def _require_servable(self, adapter: Path) -> None:
        if not self._engine.serves_adapters:
            raise WeightsError(f"{adapter} is an adapter, and this server was started without inference.enable_lora = true")
        if not is_same_model(base := base_of(adapter), self._model_name):
            raise WeightsError(
                f"{adapter} is an adapter for {base}, and this server serves {self._model_name}: start one with "
                f"inference.model.name = {base!r}"
            )

    async def _switch(self, directory: Path, manifest: Manifest) -> None:
        started = self._clock()
        before = self._directory, self.policy
        await self._pause()
        try:
            await self._replace(directory, manifest)
        except Exception as exc:  # noqa: BLE001  whatever the engine raises, a half-replaced policy must not sample
            logger.error("load failed directory=%s version=%s: %s", directory, manifest.version, exc)
            await self._restore(*before, failed=directory, cause=exc)
        await self._engine.resume()
        logger.info("policy loaded version=%s seconds=%.2f", manifest.version, self._clock() - started)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._engine.pause()
        except Exception as exc:  # an engine that does not pause would keep every later request waiting
            self._on_broken()
            raise InferenceError(f"the engine did not pause ({type(exc).__name__}: {exc}): the server ends") from exc

    async def _replace(self, directory: Path, manifest: Manifest) -> None:
        async with asyncio.timeout(self._timeout_s):
            await self._put(directory)
            reach("reload.during", step=manifest.version)
            self._engine.ledger.switch(manifest.version, at=self._clock())
            await self._engine.forget()
        self._directory, self._policy = directory, manifest

    async def _put(self, directory: Path) -> None:
        """Load what of `directory` the engine does not have: beside the start model an adapter is all there is to load."""
        adapter = directory if is_adapter(directory) else None
        whole = self._start_directory if adapter else directory
        if not (self._engine.serves_adapters and whole == self._whole == self._start_directory):
            self._whole = None
            await self._engine.load(whole)
            self._whole = whole
        if self._engine.serves_adapters:
            await self._engine.load_adapter(adapter)

    async def _restore(self, directory: Path, manifest: Manifest, *, failed: Path, cause: Exception) -> NoReturn:
        reason = f"{failed} could not be loaded ({type(cause).__name__}: {cause})"
        try:
            await self._replace(directory, manifest)
        except Exception as exc:  # noqa: BLE001  nothing is known about the weights any more: only a new process can serve
            self._on_broken()
            raise InferenceError(f"{reason}, nor could {directory} again ({exc}): the server ends") from cause
        await self._engine.resume()
        raise InferenceError(f"{reason}; policy {manifest.version} is served again") from cause
