"""Extends vLLM's engine client so that the policy that sampled each token is known, although policies change while requests run.

Every answer has three properties:

- Each token has the version of the policy with which the engine sampled it (`engine_records`).
- A request's key in the prefix cache has a salt that stands for the policy under which the request was admitted. So it never
  reuses keys and values that another policy computed.
- A request that has no token yet when the policy changes is restarted under the new policy. Only a completion that already has
  tokens continues with keys and values of the previous policy. Its token versions then name both policies.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from trivet.errors import InferenceError
from trivet.faults import reach
from trivet.inference.engine_process import await_children, end_with_api_server
from trivet.inference.engine_records import PolicyLedger, RequestEngines, TokenVersions
from trivet.inference.policy_loader import EnginePart
from trivet.inference.vllm_names import (
    AsyncLLM,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineDeadError,
    LoRARequest,
    MultiprocExecutor,
    OutputProcessorOutput,
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
    SamplingParams,
    TokensPrompt,
    UniProcExecutor,
    WeightTransferInitRequest,
    current_platform,
)
from trivet.inference.worker_extension import POLICY_ADAPTER_ID, policy_adapter
from trivet.storage.durable import FileRecord
from trivet.wire.versions import TransferRound

_SALT_SEPARATOR = "/"
"""Separates the policy's part of a cache salt from the part that the request brought."""
_RECEIVE_POLL_INTERVAL_S = 0.05
"""Seconds between two questions whether the workers have received a policy. The engine answers each between two of its steps."""
_PROBE_ID_START = "probe-"
"""The first characters of the ids of requests that score a probe. Users' requests have other ids."""

_collected_versions: ContextVar[list[TokenVersions] | None] = ContextVar("collected_versions", default=None)
"""The list to which a request of the current task adds its versions; None: it adds them nowhere."""


@contextmanager
def collect_versions() -> Iterator[list[TokenVersions]]:
    """Collect the token versions of every request that the `with` block, or a task started in it, sends to the engine, in order."""
    collected: list[TokenVersions] = []
    token = _collected_versions.set(collected)
    try:
        yield collected
    finally:
        _collected_versions.reset(token)


@dataclass(slots=True)
class _Attempt:
    """One completion of a request, as it was last handed to the engine. A restart of the request makes a later attempt of it."""

    request: EngineCoreRequest
    index: int
    """Position of the completion among the completions of the request."""
    versions: TokenVersions
    """Versions of all completions of the request."""
    sent_at: float
    """Monotonic seconds. Tokens that were sampled earlier belong to an earlier attempt, which was abandoned."""


@dataclass(slots=True, weakref_slot=True)
class _AdmittedRequest:
    """A request that the engine has. It is kept as long as vLLM keeps the collector of its outputs."""

    versions: TokenVersions = field(default_factory=TokenVersions)
    attempts: dict[int, _Attempt] = field(default_factory=dict)
    """The newest attempt at each completion of the request, by completion index."""


class VersionedEngine(AsyncLLM):
    """The engine of an API server. `PolicyLoader` loads policies into it; `routes` checks with it whether every worker answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ledger = PolicyLedger()
        self.transfer_backend = ""
        """`nccl` or `gloo`, as `inference.weights_transport` says; empty if the engine takes part in no transfer."""
        self.transfer_key = b""
        """The key that every rank of a transfer must have."""
        self._admitted: WeakKeyDictionary[RequestOutputCollector, _AdmittedRequest] = WeakKeyDictionary()
        """The requests that the engine has, by the collector of a request's outputs, which vLLM makes."""
        self._may_admit = asyncio.Event()
        """Not set from a pause until `resume`. New requests wait for it."""
        self._may_admit.set()
        self._num_adapter_loads = 0
        self._held_outputs: list[tuple[list[EngineCoreOutput], float, tuple[Any, ...], dict[str, Any]]] | None = None
        """Calls of `process_outputs` with outputs of a policy that is not confirmed yet, in order: the outputs, the time at which
        they were sampled, further arguments. None: outputs are passed on at once."""
        self._has_scored = False
        """True when `score` has let the paused engine go on since the last pause."""
        self._paused_at = 0.0
        self.pause_s = 0.0
        """Seconds for which the engine sampled nothing in the last pause that has ended."""
        super().__init__(*args, **kwargs)
        self._request_engines = RequestEngines.install(self.engine_core)
        # Every completion passes through `add_request`, also each of several completions of one request.
        self._add_in_vllm = self.output_processor.add_request
        self.output_processor.add_request = self._record_and_add
        # `process_outputs` is the last place where tokens still have the time at which the engine sampled them.
        self._process_in_vllm = self.output_processor.process_outputs
        self.output_processor.process_outputs = self._process_and_count

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        """Generate as vLLM does. A request that comes while a policy is loaded waits for the end of the load."""
        await self._may_admit.wait()
        if self.serves_adapters and kwargs.get("lora_request") is None:
            kwargs["lora_request"] = policy_adapter()
        salted: Any = {**prompt, "cache_salt": self._make_salt(prompt.get("cache_salt"))}
        async for output in super().generate(salted, *args, **kwargs):
            yield output

    def _record_and_add(
        self,
        request: EngineCoreRequest,
        prompt: Any,
        parent_req: Any = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """Record a completion's first attempt, then add it in vLLM. The signature is that of `OutputProcessor.add_request`."""
        assert queue is not None, "vLLM's server collects the outputs of every request"
        admitted = self._admitted.get(queue)
        if admitted is None:
            admitted = self._admitted[queue] = _AdmittedRequest()
            # A user's adapter with a name of its own is no policy, so its tokens have no policy version.
            is_of_policy = request.lora_request is None or request.lora_request.lora_int_id == POLICY_ADAPTER_ID
            if (collected := _collected_versions.get()) is not None and is_of_policy:
                collected.append(admitted.versions)
        admitted.attempts[request_index] = _Attempt(request, request_index, admitted.versions, sent_at=time.monotonic())
        self._add_in_vllm(request, prompt, parent_req, request_index, queue)

    def _process_and_count(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> OutputProcessorOutput:
        """Process outputs in vLLM, then count their tokens to the policy that sampled them.

        Outputs of abandoned attempts are dropped. While a policy is not confirmed, outputs of users' requests are held back and
        only those of probe requests are processed.

        Args:
            engine_core_timestamp: monotonic seconds at which the engine sampled the tokens.
        """
        assert engine_core_timestamp is not None
        if self._held_outputs is not None:
            of_users = [output for output in engine_core_outputs if not output.request_id.startswith(_PROBE_ID_START)]
            self._held_outputs.append((of_users, engine_core_timestamp, args, kwargs))
            engine_core_outputs = [output for output in engine_core_outputs if output.request_id.startswith(_PROBE_ID_START)]
        version = self.ledger.version_at(engine_core_timestamp)
        pairs = [(output, self._find_attempt(output)) for output in engine_core_outputs]
        current = [
            (output, attempt) for output, attempt in pairs if attempt is None or attempt.sent_at <= engine_core_timestamp
        ]
        # Tokens are counted after the processing, because it removes tokens that follow a stop string. There is no await between
        # the two, so no answer is made before its last tokens are counted.
        processed = self._process_in_vllm([output for output, _ in current], engine_core_timestamp, *args, **kwargs)
        for output, attempt in current:
            if attempt is not None and output.new_token_ids:
                attempt.versions.record(attempt.index, num_tokens=len(output.new_token_ids), version=version)
        return processed

    def _find_attempt(self, output: EngineCoreOutput) -> _Attempt | None:
        """Return the attempt to which `output` belongs; None when vLLM has dropped the request."""
        state = self.output_processor.request_states.get(output.request_id)
        admitted = self._admitted.get(state.queue) if state is not None and state.queue is not None else None
        return None if state is None or admitted is None else admitted.attempts[state.request_index]

    async def pause(self) -> None:
        """Stop sampling and let new requests wait. Requests in the engine and the KV cache stay."""
        self._may_admit.clear()
        await self.pause_generation(mode="keep", clear_cache=False)
        self._has_scored, self._paused_at = False, time.monotonic()

    async def load(self, directory: Path, *, is_received: bool = False) -> None:
        """Replace the weights of every worker by those in `directory`.

        Args:
            is_received: read the files that `receive` received, and not `directory`.
        """
        await self.collective_rpc("load_policy", args=(str(directory), is_received))

    async def receive(self, transfer: TransferRound, records: dict[str, FileRecord]) -> None:
        """Receive a policy into the main memory of every worker, while requests go on. `load` reads it from there.

        Args:
            records: the policy's weight files, by name.

        Raises:
            Exception: a rank is missing, silent or lost, or other bytes arrived. vLLM passes errors of workers on as errors of its
                own.
        """
        reach("transfer.init", step=transfer.version)
        info = {"backend": self.transfer_backend, "key": self.transfer_key}
        info |= {"transfer": msgspec.to_builtins(transfer), "records": msgspec.to_builtins(records)}
        await self.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        reach("transfer.receive", step=transfer.version)
        # Each exchange of the workers has the round's deadline. How many there are depends on the policy's size.
        while not all(await self.collective_rpc("is_transfer_done")):  # noqa: ASYNC110  workers are other processes
            await asyncio.sleep(_RECEIVE_POLL_INTERVAL_S)

    @property
    def num_workers(self) -> int:
        """The workers that take part in a transfer."""
        return self.vllm_config.parallel_config.world_size_across_dp if self.transfer_backend else 0

    @property
    def serves_adapters(self) -> bool:
        """True when the engine was started with `enable_lora`. Every policy is then served as an adapter, if only an empty one."""
        return self.vllm_config.lora_config is not None

    async def load_adapter(self, directory: Path | None) -> None:
        """Replace the policy's adapter in every worker by the one in `directory`; None: by an adapter that changes nothing."""
        await self.collective_rpc("load_policy_adapter", args=(None if directory is None else str(directory),))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a user's adapter under its own name. It replaces an adapter of the same name. vLLM's routes call this method."""
        is_added = await super().add_lora(lora_request)
        # vLLM passes the same object with later requests, which must not read the files again.
        lora_request.load_inplace = False
        self._num_adapter_loads += 1
        return is_added

    async def capture_experts(self) -> None:
        """Let the workers return routed experts, if the engine was started to do so on a CPU. Call it before the first request."""
        if self.vllm_config.aux_output_config.enabled and current_platform.is_cpu():
            await self.collective_rpc("capture_experts")

    async def drop_caches(self) -> None:
        """Drop the prefix cache and restart requests that have no token yet. Outputs are held back from now until `resume`."""
        self._held_outputs = self._held_outputs or []
        await self.reset_prefix_cache()
        await self._restart_requests_without_tokens()

    @property
    def dtype(self) -> str:
        """The dtype that the model computes in, by torch's name."""
        return str(self.vllm_config.model_config.dtype).removeprefix("torch.")

    async def score(self, samples: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Compute the log-probability of each token but the first. Return a list per engine, in it a list per sample.

        The paused requests go on meanwhile. Afterwards call `resume`, which passes on their outputs, or `undo_score`, which makes
        these requests fail.
        """
        self._has_scored = True
        await self._end_pause()
        num_engines = self.vllm_config.parallel_config.data_parallel_size
        ranks = range(num_engines) if num_engines > 1 else [None]
        return [list(await asyncio.gather(*(self._score_one(ids, rank=rank) for ids in samples))) for rank in ranks]

    async def _score_one(self, token_ids: Sequence[int], *, rank: int | None) -> list[float]:
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        scored: list[float] = []
        async for output in super().generate(
            TokensPrompt(prompt_token_ids=list(token_ids)),
            params,
            f"{_PROBE_ID_START}{uuid.uuid4().hex}",
            lora_request=policy_adapter() if self.serves_adapters else None,
            data_parallel_rank=rank,
        ):
            entries = (output.prompt_logprobs or [])[1:]
            scored = [entry[token].logprob for entry, token in zip(entries, token_ids[1:], strict=True) if entry is not None]
        return scored

    async def undo_score(self) -> None:
        """If `score` ran since the pause: pause again, and fail every request, which may have tokens of the refused policy."""
        if not self._has_scored:
            return
        await self.pause()
        self._held_outputs = []
        self.output_processor.propagate_error(
            InferenceError("the weights that sampled this answer were refused; send it again")
        )

    async def resume(self) -> None:
        """Sample again, pass on the outputs that were held back, and admit the waiting requests."""
        if not self._has_scored:
            await self._end_pause()
        held_outputs, self._held_outputs = self._held_outputs or [], None
        processed = [
            self._process_and_count(outputs, sampled_at, *args, **kwargs) for outputs, sampled_at, args, kwargs in held_outputs
        ]
        if stopped := [request_id for output in processed for request_id in output.reqs_to_abort]:
            await self.engine_core.abort_requests_async(stopped)
        self._may_admit.set()

    async def _end_pause(self) -> None:
        await self.resume_generation()
        self.pause_s = time.monotonic() - self._paused_at

    async def suspend(self) -> None:
        """Free the GPU memory of a paused engine. Its requests go on after `wake`, with their keys and values computed anew."""
        # Level 1 copies the weights to main memory; level 2 would not. But at level 2 vLLM 0.32 keeps only a model's buffers, and a
        # reload fills only parameters that the checkpoint has. Other parameters, and tensors that are plain attributes, such as the
        # slopes of MiniMax's linear attention (`tp_slope`), would come back with arbitrary content.
        await self.sleep(level=1, mode="keep")

    async def wake(self, part: EnginePart) -> None:
        """Take GPU memory for a part again. vLLM goes on with its requests once both parts have their memory."""
        await self.wake_up(tags=[part])

    async def ping(self) -> None:
        """Return once every worker has answered."""
        await self.collective_rpc("ping")

    async def stop(self) -> None:
        """End the engine. Requests without an answer fail at once."""
        if self.output_handler is not None:
            # vLLM's output handler would report this intended end as the death of the engine.
            self.output_handler.cancel()
        self.output_processor.propagate_error(EngineDeadError())
        await asyncio.to_thread(self.shutdown, timeout=0)
        await asyncio.to_thread(await_children)

    async def _restart_requests_without_tokens(self) -> None:
        attempts = [
            attempt
            for admitted in list(self._admitted.values())
            for index, attempt in admitted.attempts.items()
            if index not in admitted.versions.runs
        ]
        request_ids = [attempt.request.request_id for attempt in attempts]
        if self._request_engines is not None:
            self._request_engines.forget_all_but(self.output_processor.request_states)
            self._request_engines.expect_end_of(request_ids)
        # abort_requests_async is not used: the engine may apply such an abort a second time, later, to the new attempt.
        await self.engine_core.call_utility_async("abort_requests", request_ids)
        for attempt in attempts:
            request = attempt.request
            if request.request_id in self.output_processor.request_states:
                _, _, request_salt = (request.cache_salt or "").partition(_SALT_SEPARATOR)
                request.cache_salt = self._make_salt(request_salt)
                attempt.sent_at = time.monotonic()
                await self.engine_core.add_request_async(request)

    def _make_salt(self, request_salt: str | None) -> str:
        """Return the cache salt of a request that is admitted now. It differs after every switch and every load of an adapter."""
        return f"{self.ledger.num_switches}.{self._num_adapter_loads}{_SALT_SEPARATOR}{request_salt or ''}"


class OneProcessExecutor(UniProcExecutor):
    """Runs the worker in the engine's own process. That process ends with the API server; vLLM would leave it running."""

    def _init_executor(self) -> None:
        end_with_api_server()
        super()._init_executor()


class ManyProcessExecutor(MultiprocExecutor):
    """Runs one worker process per rank. The workers end with the engine's process, which ends with the API server."""

    def _init_executor(self) -> None:
        end_with_api_server()
        super()._init_executor()
