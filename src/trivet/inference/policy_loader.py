"""Loads policies into the engine: one at a time, each whole or not at all. The HTTP routes (`routes`) call it.

These are the steps of one policy from the orchestrator onto this server:

    client.server_pool → client.inference_client → POST /update_weights (`routes`)
    → with `weights.transport = "http"`: `PolicyFetcher.load` → `weights.fetch.PolicyCache.fetch`
    → `PolicyLoader.load`: verify the files, `VersionedEngine.pause` (no token is sampled from here on)
    → `VersionedEngine.load` or `.load_adapter` → collective_rpc → `PolicyWorkerExtension.load_policy` in every vLLM worker
    → `engine_records.PolicyLedger.switch` (later tokens carry the new version) → `VersionedEngine.drop_caches`
    → `VersionedEngine.score`: the engine reproduces the policy's probe (`weights.probe`) → `.resume` → answer

With a transfer (`inference.weights_transport`) `VersionedEngine.receive` gets the files from the trainer's memory before the pause,
and they are loaded in place of those of the directory. If it fails, the directory is verified and loaded.

With `inference.sleep_while_training` the engine sleeps before the load. Its weights take GPU memory again before the load, its KV
cache takes GPU memory after the load. While the trainer has not freed that memory, the load waits.
If a step fails after the pause, the previous policy is loaded again in the same way. If that fails too, the server ends.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from trivet.algorithms.probe import ProbeResult, compare, convert_dtype
from trivet.errors import InferenceError, WeightsError
from trivet.faults import reach
from trivet.key_names import key_name
from trivet.telemetry import process_report
from trivet.weights.adapters import base_of, is_adapter, is_same_model
from trivet.weights.manifest import Manifest, make_start_manifest, verify_files, verify_manifest
from trivet.wire.versions import TransferRound

if TYPE_CHECKING:
    from trivet.inference.versioned_engine import VersionedEngine

logger = logging.getLogger(__name__)

_MAX_GROWTH = 4
"""The most times that a policy's directory may be as large as the start model. A policy is as large, or twice as large when the
trainer's dtype is wider. A larger directory is not read, because it could be a sparse file of any size, which costs nothing to
write; reading it would keep every later load waiting."""
_MAX_EXTRA_BYTES = 1 << 30
"""Bytes allowed on top: for the tokenizer's files, and for the adapter of a tiny model, which may be larger than the model."""
_LOAD_TIMEOUT_S = 600.0
"""Longest time for the engine to pause, and then for it to load. Every request waits meanwhile, so a stuck load must fail."""
_WAKE_TIMEOUT_S = 100.0
"""Longest time in which the GPU memory of a sleeping engine must become free. The trainer frees its memory before its policy can be
read, and a trainer that was started again frees what it needed to load. Two such waits, for the policy and for the
previous one, must be shorter than the default of `client.admin_timeout`."""
_WAKE_RETRY_INTERVAL_S = 2.0
"""Seconds between two attempts to take GPU memory."""

_FILES = "files"

EnginePart = Literal["weights", "kv_cache"]
"""A part of the engine's GPU memory, by vLLM's name."""


def require_below(roots: Sequence[Path], directory: Path) -> None:
    """Check that `directory` is below one of `roots`, so that a request cannot make the server read any other file.

    Raises:
        WeightsError: it is below none, with links followed.
    """
    resolved = directory.resolve()
    if not any(resolved.is_relative_to(root.resolve()) for root in roots):
        raise WeightsError(
            f"{directory} is not below {' or '.join(map(str, roots))}, from where this server loads weights; start it with the "
            "output_dir of the run, or add a directory to inference.server.weight_dirs"
        )


class PolicyLoader:
    """Replaces the policy that the engine serves, and keeps its manifest."""

    def __init__(
        self,
        engine: "VersionedEngine",
        *,
        model_name: str,
        start_directory: Path,
        roots: Sequence[Path],
        on_broken: Callable[[], None],
        timeout_s: float = _LOAD_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Load into `engine`, which serves the start model.

        Args:
            model_name: the base model. An adapter of another base model is refused.
            start_directory: where the start model's files are.
            roots: directories below which policies may be loaded from.
            on_broken: called when the engine has neither the new policy nor the previous one; it stays paused.
            timeout_s: longest time for the engine to pause, and for it to load.
        """
        self._engine = engine
        self._model_name = model_name
        self._start_directory = start_directory
        self._roots = roots
        self._on_broken = on_broken
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        self._lock = asyncio.Lock()
        self._directory = start_directory
        self._base_directory: Path | None = start_directory
        """The directory from which the engine loaded its full weights, without an adapter; None after a failed load."""
        self._start: Manifest | None = None
        """The manifest of the start model; None before `prepare`."""
        self._policy: Manifest | None = None
        """The manifest of the served policy; None before `prepare`."""
        self.probe_result: ProbeResult | None = None
        """How closely the engine reproduces the served policy's probe; None for a policy without one."""
        self.source = _FILES
        """Where the served policy came from: `files`, `nccl` or `gloo`."""
        self._parts_asleep: set[EnginePart] = set()
        """The parts of the engine that have no GPU memory."""

    async def prepare(self) -> None:
        """Read all of the start model for the digest of version 0. Call it before anything is served."""
        self._start = self._policy = await asyncio.to_thread(make_start_manifest, self._start_directory)
        await self._engine.capture_experts()
        if self._engine.serves_adapters:
            await self._engine.load_adapter(None)

    @property
    def policy(self) -> Manifest:
        """The manifest of the policy that is served now."""
        assert self._policy is not None
        return self._policy

    @property
    def max_bytes(self) -> int:
        """The size of the largest policy that is loaded."""
        assert self._start is not None
        return _MAX_GROWTH * self._start.num_bytes + _MAX_EXTRA_BYTES

    @property
    def dtype(self) -> str:
        """The dtype that the engine computes in, by torch's name."""
        return self._engine.dtype

    async def load(self, directory: Path, transfer: TransferRound | None = None, *, is_verified: bool = False) -> Manifest:
        """Serve the policy in `directory`; return its manifest.

        Args:
            transfer: a round in which the trainer sends the policy. If it fails, the files in `directory` are loaded.
            is_verified: every byte was compared with the manifest, in a directory where nobody else can change it.

        Raises:
            WeightsError: `directory` is below none of the roots, much larger than the start model or not whole, or it has an
                adapter that this server cannot serve; the previous policy was served all the time. Or the engine does not
                reproduce the policy's probe; the previous policy is served again.
            InferenceError: the engine could not load it; the previous policy is served again, or the server ends.
        """
        require_below(self._roots, directory)
        async with self._lock:
            manifest = await asyncio.to_thread(verify_manifest, directory, max_bytes=self.max_bytes)
            is_received = transfer is not None and await self._receive(transfer, directory, manifest)
            if not is_received and not is_verified:
                await asyncio.to_thread(verify_files, directory, manifest)
            if is_adapter(directory):
                if not self._engine.serves_adapters:
                    raise WeightsError(
                        f"{directory} is an adapter, and this server was started without {key_name('inference.enable_lora')} = true"
                    )
                if not is_same_model(base := base_of(directory), self._model_name):
                    raise WeightsError(
                        f"{directory} is an adapter for {base}, and this server serves {self._model_name}: start one with "
                        f"{key_name('inference.model.name')} = {base!r}"
                    )
            reach("reload.before", step=manifest.version)
            await self._switch(directory, manifest, is_received=is_received)
            reach("reload.after", step=manifest.version)
            return manifest

    async def load_start(self) -> Manifest:
        """Serve the start weights again, version 0."""
        assert self._start is not None
        async with self._lock:
            await self._switch(self._start_directory, self._start)
            return self._start

    @property
    def is_asleep(self) -> bool:
        """True while a part of the engine has no GPU memory. The engine answers nothing before the next load."""
        return bool(self._parts_asleep)

    async def sleep(self) -> None:
        """Free the engine's GPU memory until the next load. Requests wait until then.

        Raises:
            InferenceError: the engine failed; the server ends.
        """
        async with self._lock:
            if self._parts_asleep:
                return
            started = self._clock()
            await self._pause()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._engine.suspend()
            except Exception as exc:  # the engine may raise anything; after an error the state of its memory is unknown
                self._on_broken()
                raise InferenceError(f"the engine did not sleep ({type(exc).__name__}: {exc}): the server ends") from exc
            self._parts_asleep = {"weights", "kv_cache"}
            process_report.begin("asleep while the trainer learns")
            logger.info("asleep seconds=%.2f", self._clock() - started)

    async def while_awake(self, change: Callable[[], Awaitable[object]]) -> None:
        """Call `change`, which changes the engine without loading a policy. Until it ends, no sleep and no load of a policy begins.

        Raises:
            WeightsError: the engine is asleep.
            InferenceError: the change took longer than a load may take; the server ends.
        """
        async with self._lock:
            if self._parts_asleep:
                raise WeightsError(
                    "this server is asleep while the trainer learns; ask again when GET /policy says asleep = false"
                )
            try:
                async with asyncio.timeout(self._timeout_s):
                    await change()
            except TimeoutError as exc:
                self._on_broken()
                raise InferenceError(f"the engine did not answer within {self._timeout_s:.0f} s: the server ends") from exc

    async def _receive(self, transfer: TransferRound, directory: Path, manifest: Manifest) -> bool:
        """Receive the policy while requests go on. Return False, after which the files are to be loaded, if that fails."""
        try:
            if not self._engine.transfer_backend or self._parts_asleep or is_adapter(directory):
                raise WeightsError("the server is asleep or was not started for transfers, or the policy is an adapter")
            await self._engine.receive(transfer, manifest.weight_files)
        except Exception as exc:  # noqa: BLE001  vLLM passes on any error of a worker, and the files are still there
            logger.warning("loading from files, not received version=%s: %s: %s", transfer.version, type(exc).__name__, exc)
            return False
        return True

    async def _switch(self, directory: Path, manifest: Manifest, *, is_received: bool = False) -> None:
        """Pause the engine, load the policy and resume. If the load fails, load the previous policy again and raise."""
        started = self._clock()
        previous_directory, previous = self._directory, self.policy
        if not self._parts_asleep:
            await self._pause()
        try:
            await self._replace(directory, manifest, is_received=is_received)
        except Exception as exc:  # noqa: BLE001  the engine may raise anything; a partly replaced policy must not sample
            logger.error("load failed directory=%s version=%s: %s", directory, manifest.version, exc)
            await self._restore(previous_directory, previous, failed=directory, cause=exc)
        await self._engine.resume()
        mismatch = f"{self.probe_result.mismatch:.3g}" if self.probe_result is not None else "not compared"
        form = "policy loaded version=%s source=%s seconds=%.2f pause_s=%.3f probe_mismatch=%s"
        logger.info(form, manifest.version, self.source, self._clock() - started, self._engine.pause_s, mismatch)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._engine.pause()
        except Exception as exc:  # an engine that does not pause would keep every later request waiting
            self._on_broken()
            raise InferenceError(f"the engine did not pause ({type(exc).__name__}: {exc}): the server ends") from exc

    async def _replace(self, directory: Path, manifest: Manifest, *, is_received: bool = False) -> None:
        """Load the policy into the paused engine and compare its probe. The attributes change only when all of it succeeded."""
        async with asyncio.timeout(self._timeout_s):
            await self._wake("weights")
            await self._load_missing(directory, is_received=is_received)
            reach("reload.during", step=manifest.version)
            self._engine.ledger.switch(manifest.version, at=self._clock())
            await self._engine.drop_caches()
            if "kv_cache" in self._parts_asleep:
                await self._wake("kv_cache")
                process_report.begin("serving")
            result = None
            if manifest.probe is not None:
                where, dtype = f"policy {manifest.version} as this server computes it", convert_dtype(self._engine.dtype)
                scores = await self._engine.score(manifest.probe.token_ids)
                # With data parallelism several engines computed the probe. The largest mismatch of them counts.
                results = [compare(manifest.probe, logprobs, dtype=dtype, where=where) for logprobs in scores]
                result = max(results, key=lambda result: result.mismatch)
        self._directory, self._policy, self.probe_result = directory, manifest, result
        self.source = self._engine.transfer_backend if is_received else _FILES

    async def _wake(self, part: EnginePart) -> None:
        """Take GPU memory for a sleeping part; retry while another process holds that memory. An awake part stays as it is."""
        deadline = self._clock() + _WAKE_TIMEOUT_S
        while part in self._parts_asleep:
            try:
                await self._engine.wake(part)
                self._parts_asleep.remove(part)
            except Exception as exc:  # vLLM raises no narrower type when the memory is not free
                if self._clock() >= deadline:
                    raise InferenceError(
                        f"the engine's {part} got no GPU memory for {_WAKE_TIMEOUT_S:.0f} s ({exc}): another process holds it; "
                        f"see nvidia-smi, or lower {key_name('inference.gpu_memory_utilization')}"
                    ) from exc
                logger.warning("waiting for GPU memory part=%s: %s", part, exc)
                await self._sleep(_WAKE_RETRY_INTERVAL_S)

    async def _load_missing(self, directory: Path, *, is_received: bool) -> None:
        """Load the part of the policy that the engine does not have: if it has the start model's weights, only the adapter."""
        adapter = directory if is_adapter(directory) else None
        base = self._start_directory if adapter else directory
        has_base = self._engine.serves_adapters and base == self._base_directory == self._start_directory
        if not has_base:
            self._base_directory = None
            await self._engine.load(base, is_received=is_received)
            self._base_directory = base
        if self._engine.serves_adapters:
            await self._engine.load_adapter(adapter)

    async def _restore(self, directory: Path, manifest: Manifest, *, failed: Path, cause: Exception) -> NoReturn:
        """Load the previous policy, in `directory`, after `cause` made the load of `failed` fail. Then raise an error."""
        reason = f"{failed} could not be loaded ({type(cause).__name__}: {cause})"
        error_type = WeightsError if isinstance(cause, WeightsError) else InferenceError
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._engine.undo_score()
            await self._replace(directory, manifest)
        except Exception as exc:  # noqa: BLE001  the weights are unknown now: only a new process can serve
            self._on_broken()
            raise InferenceError(f"{reason}, nor could {directory} again ({exc}): the server ends") from cause
        await self._engine.resume()
        raise error_type(f"{reason}; policy {manifest.version} is served again") from cause
