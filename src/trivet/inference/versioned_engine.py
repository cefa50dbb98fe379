"""Extends vLLM's engine client: it knows which policy sampled each token, and reports every mix of two policies' KV caches.

Every answer has three properties:

- Each token is counted to the policy that the engine had when it sampled it (`engine_records`).
- A request is salted with the policy it is admitted under, so it reuses no other policy's prefix cache.
- A request that has no token yet when the policy changes is restarted under the new one. Only a completion that already has
  tokens continues with the keys and values of the policy before, and its versions show it.
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

from trivet.errors import InferenceError
from trivet.inference.engine_process import await_children, end_with_api_server
from trivet.inference.engine_records import EngineRoutes, PolicyLedger, TokenVersions
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
)
from trivet.inference.worker_extension import POLICY_ADAPTER_ID, policy_adapter

_SALT_END = "/"
_PROBE = "probe-"
"""How the ids of the engine's own requests begin."""

_answering: ContextVar[list[TokenVersions] | None] = ContextVar("answering", default=None)


@contextmanager
def collect_versions() -> Iterator[list[TokenVersions]]:
    """Collect the versions of every request that the block, or a task it starts, sends to the engine, in order."""
    collected: list[TokenVersions] = []
    token = _answering.set(collected)
    try:
        yield collected
    finally:
        _answering.reset(token)


@dataclass(slots=True)
class _Attempt:
    """One completion of a request, as it was last handed to the engine."""

    request: EngineCoreRequest
    index: int
    """Position of the completion among those of the request."""
    versions: TokenVersions
    """Versions of all completions of the request."""
    since: float
    """Monotonic seconds. Tokens sampled earlier belong to an attempt that was abandoned."""


@dataclass(slots=True, weakref_slot=True)
class _Admitted:
    """A request that the engine has. It is kept as long as vLLM keeps the collector of its outputs."""

    versions: TokenVersions = field(default_factory=TokenVersions)
    attempts: dict[int, _Attempt] = field(default_factory=dict)
    """By completion index."""


class VersionedEngine(AsyncLLM):
    """The engine of an API server. `PolicyLoader` has it load policies, the routes ask whether it answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ledger = PolicyLedger()
        self._admitted: WeakKeyDictionary[RequestOutputCollector, _Admitted] = WeakKeyDictionary()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._num_adapter_loads = 0
        self._held: list[tuple[list[EngineCoreOutput], float, tuple[Any, ...], dict[str, Any]]] | None = None
        """Outputs of weights that are not confirmed yet, in order; None: outputs are passed on."""
        self._has_scored = False
        """`score` let the engine go on since it was paused."""
        super().__init__(*args, **kwargs)
        self._routes = EngineRoutes.install(self.engine_core)
        # The only place that every completion passes, those of a request with several too.
        self._add_request_state = self.output_processor.add_request
        self.output_processor.add_request = self._admit_then_add
        # The only place where tokens still carry the time at which the engine sampled them.
        self._process_outputs = self.output_processor.process_outputs
        self.output_processor.process_outputs = self._process_then_count

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        """Generate as vLLM does. A request that comes while a policy is loaded waits for it."""
        await self._is_open.wait()
        if self.serves_adapters and kwargs.get("lora_request") is None:
            kwargs["lora_request"] = policy_adapter()
        salted: Any = {**prompt, "cache_salt": self._salt(prompt.get("cache_salt"))}
        async for output in super().generate(salted, *args, **kwargs):
            yield output

    def _admit_then_add(
        self,
        request: EngineCoreRequest,
        prompt: Any,
        parent_req: Any = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        assert queue is not None, "vLLM's server collects the outputs of every request"
        admitted = self._admitted.get(queue)
        if admitted is None:
            admitted = self._admitted[queue] = _Admitted()
            # No version of the policy samples the tokens of an adapter under a name of its own.
            is_of_policy = request.lora_request is None or request.lora_request.lora_int_id == POLICY_ADAPTER_ID
            if (collected := _answering.get()) is not None and is_of_policy:
                collected.append(admitted.versions)
        admitted.attempts[request_index] = _Attempt(request, request_index, admitted.versions, since=time.monotonic())
        self._add_request_state(request, prompt, parent_req, request_index, queue)

    def _process_then_count(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> OutputProcessorOutput:
        assert engine_core_timestamp is not None
        if self._held is not None:
            others = [output for output in engine_core_outputs if not output.request_id.startswith(_PROBE)]
            self._held.append((others, engine_core_timestamp, args, kwargs))
            engine_core_outputs = [output for output in engine_core_outputs if output.request_id.startswith(_PROBE)]
        version = self.ledger.version_at(engine_core_timestamp)
        found = [(output, self._find_attempt(output)) for output in engine_core_outputs]
        current = [(output, attempt) for output, attempt in found if attempt is None or attempt.since <= engine_core_timestamp]
        # Processing removes tokens behind a stop string, so they are counted afterwards. Nothing awaits in between, so no answer
        # is made before its last tokens are counted.
        processed = self._process_outputs([output for output, _ in current], engine_core_timestamp, *args, **kwargs)
        for output, attempt in current:
            if attempt is not None and output.new_token_ids:
                attempt.versions.record(attempt.index, num_tokens=len(output.new_token_ids), version=version)
        return processed

    def _find_attempt(self, output: EngineCoreOutput) -> _Attempt | None:
        """Return the attempt that `output` is for; None when its request is gone."""
        state = self.output_processor.request_states.get(output.request_id)
        admitted = self._admitted.get(state.queue) if state is not None and state.queue is not None else None
        return None if state is None or admitted is None else admitted.attempts[state.request_index]

    async def pause(self) -> None:
        """Keep new requests waiting and stop sampling; the KV cache stays."""
        self._is_open.clear()
        await self.pause_generation(mode="keep", clear_cache=False)
        self._has_scored = False

    async def load(self, directory: Path) -> None:
        """Replace the weights of every worker by those in `directory`."""
        await self.collective_rpc("load_policy", args=(str(directory),))

    @property
    def serves_adapters(self) -> bool:
        """The engine was started with `enable_lora`."""
        return self.vllm_config.lora_config is not None

    async def load_adapter(self, directory: Path | None) -> None:
        """Replace the policy's adapter in every worker; None: by one that changes nothing."""
        await self.collective_rpc("load_policy_adapter", args=(None if directory is None else str(directory),))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter under a name of its own, in place of one that has the name."""
        is_added = await super().add_lora(lora_request)
        # Later requests carry this object, and must not read the files again.
        lora_request.load_inplace = False
        self._num_adapter_loads += 1
        return is_added

    async def drop_caches(self) -> None:
        """Drop the prefix cache, and restart requests that have no token yet. Until `resume` no answer leaves the engine."""
        self._held = self._held or []
        await self.reset_prefix_cache()
        await self._restart_requests_without_tokens()

    @property
    def dtype(self) -> str:
        """The dtype that the model computes in, by torch's name."""
        return str(self.vllm_config.model_config.dtype).removeprefix("torch.")

    async def score(self, samples: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Compute the log-probability of each token but the first, on every engine of the server, by sample.

        Requests that were paused go on meanwhile: `resume` passes on what they get, `discard` fails them.
        """
        self._has_scored = True
        await self.resume_generation()
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
            f"{_PROBE}{uuid.uuid4().hex}",
            lora_request=policy_adapter() if self.serves_adapters else None,
            data_parallel_rank=rank,
        ):
            entries = (output.prompt_logprobs or [])[1:]
            scored = [entry[token].logprob for entry, token in zip(entries, token_ids[1:], strict=True) if entry is not None]
        return scored

    async def discard(self) -> None:
        """Undo `score`: pause again, and fail the requests that may have got tokens of weights that are not served."""
        if not self._has_scored:
            return
        await self.pause()
        self._held = []
        self.output_processor.propagate_error(
            InferenceError("the weights that sampled this answer were refused; send it again")
        )

    async def resume(self) -> None:
        """Sample again, pass on what was held, and admit the requests that wait."""
        await self.resume_generation()
        held, self._held = self._held or [], None
        processed = [self._process_then_count(outputs, at, *args, **kwargs) for outputs, at, args, kwargs in held]
        if stopped := [request_id for output in processed for request_id in output.reqs_to_abort]:
            await self.engine_core.abort_requests_async(stopped)
        self._is_open.set()

    async def suspend(self) -> None:
        """Free the GPU memory of a paused engine. Its requests go on after it woke, with their keys and values computed anew."""
        # Level 2 would need no copy of the weights in main memory. But at that level vLLM 0.32 keeps only a model's buffers, and a
        # reload fills only parameters that the checkpoint has. A parameter that it lacks, and a tensor that is a plain attribute,
        # such as the slopes of MiniMax's linear attention (`tp_slope`), would come back with arbitrary content.
        await self.sleep(level=1, mode="keep")

    async def wake(self, part: EnginePart) -> None:
        """Take GPU memory for a part again; vLLM goes on with its requests once both parts have it."""
        await self.wake_up(tags=[part])

    async def ping(self) -> None:
        """Return once every worker has answered."""
        await self.collective_rpc("ping")

    async def stop(self) -> None:
        """End the engine. Requests that it has not answered fail at once."""
        if self.output_handler is not None:
            # It would report this intended end as the death of the engine.
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
        if self._routes is not None:
            self._routes.forget_all_but(self.output_processor.request_states)
            self._routes.expect_end_of(request_ids)
        # Not abort_requests_async: the engine may apply such an abort a second time, later, to the attempt that follows.
        await self.engine_core.call_utility_async("abort_requests", request_ids)
        for attempt in attempts:
            request = attempt.request
            if request.request_id in self.output_processor.request_states:
                _, _, own_salt = (request.cache_salt or "").partition(_SALT_END)
                request.cache_salt = self._salt(own_salt)
                attempt.since = time.monotonic()
                await self.engine_core.add_request_async(request)

    def _salt(self, own_salt: str | None) -> str:
        return f"{self.ledger.num_switches}.{self._num_adapter_loads}{_SALT_END}{own_salt or ''}"


class OneProcessExecutor(UniProcExecutor):
    """Runs the worker in the engine's own process, which ends with the API server. vLLM would leave it behind."""

    def _init_executor(self) -> None:
        end_with_api_server()
        super()._init_executor()


class ManyProcessExecutor(MultiprocExecutor):
    """Runs one worker process per rank; these end with the engine's process, and that with the API server."""

    def _init_executor(self) -> None:
        end_with_api_server()
        super()._init_executor()
