"""Runs groups with one environment of the v1 API. A task is an example with its index as id; an episode is a rollout.

An agent's harness is a program. verifiers catches its model requests at an interception endpoint, which passes them to a client.
`TrivetClient` sends such a chat-completions request on to a trivet server, with the tokens of the turn that it continues. The
server has the tokenizer, the chat template and the tool parser, so a worker needs none of them. The tokens that the server reports
are trained on. verifiers' own train client would tokenize the conversation itself, with its own template.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import PrivateAttr
from verifiers.v1 import ClientConfig, Env, EvalClientConfig, ModelContext, Sampling, Task, Trace
from verifiers.v1.clients import Client, EvalClient, TrainClientConfig
from verifiers.v1.clients import eval as eval_client
from verifiers.v1.clients.base import DEFAULT_LIMITS
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import server as interception_server
from verifiers.v1.types import Response, SamplingConfig, TurnTokens

from trivet.environments.apis.groups import Stage, StageBoard, limit_time, play_group
from trivet.environments.apis.messages import find_answer, find_example, shorten_messages
from trivet.environments.apis.rewards import collect_reward_errors
from trivet.environments.apis.turns import Turn, later_seed, read_turn, request_arguments, rollout_seed
from trivet.environments.apis.v1.score import OUT_OF_CONTEXT, make_failure, rescore, task_messages, to_rollout
from trivet.errors import RolloutFailed
from trivet.process.proxies import is_direct
from trivet.wire.groups import OVERLONG_REFUSALS, EnvironmentInfo, Example, GroupRequest, Split, server_root
from trivet.wire.rollouts import Rollout
from trivet.wire.workers import HostSettings

_CONNECT_TIMEOUT_S = 30.0
"""Longest time to connect to a server, as in verifiers. So an address that does not exist is reported soon, however long a request
may take."""
_STREAM_FIELDS = ("stream", "stream_options")
"""Fields of a request that are left out: only a complete answer has policy versions."""
_TOKEN_FIELDS = ("token_ids", "logprobs", "policy_versions", "routed_experts")
"""Fields of an answer's choice that the harness program does not get."""


class ServedTurns:
    """Keeps the tokens of the turns of running episodes, by trace and by the message that a turn sampled.

    verifiers puts the message object of an answer into its graph of messages as it is, so the object identifies the turn. A message
    that an environment has rewritten is another object: its text was not sampled, and is not trained on.
    """

    def __init__(self) -> None:
        self._turns: dict[str, dict[int, tuple[Any, Turn]]] = {}
        """By trace id and the `id()` of the message: the message and its turn."""
        self.numbers: dict[str, int] = {}
        """The index of each trace in its episode, by trace id, from 0. Seeds are derived from it."""

    def record(self, trace_id: str, message: Any, turn: Turn) -> None:
        """Keep `turn`, which sampled `message`."""
        # The message is stored too: while it exists, Python gives its id to no other object.
        self._turns.setdefault(trace_id, {})[id(message)] = (message, turn)

    def find(self, trace_id: str, message: Any) -> Turn | None:
        """Return the turn that sampled `message`; None when none did."""
        found = self._turns.get(trace_id, {}).get(id(message))
        return None if found is None else found[1]

    def forget(self, trace_id: str) -> None:
        """Drop the turns of a trace. May be called again."""
        self._turns.pop(trace_id, None)
        self.numbers.pop(trace_id, None)

    def __len__(self) -> int:
        """Return the number of traces that are kept."""
        return len(self._turns.keys() | self.numbers.keys())


@dataclass(slots=True, kw_only=True)
class V1Host:
    """Implements `apis.load.EnvironmentHost` for verifiers 0.4 and newer."""

    env: Env
    tasks: Sequence[Task]
    """Used to train and to evaluate."""
    settings: HostSettings
    info: EnvironmentInfo
    stages: StageBoard
    api: str = "v1"
    _turns: ServedTurns = field(default_factory=ServedTurns)

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Play and score the episodes of a group, or score recorded ones; see `EnvironmentHost.run_group`."""
        task = find_example(self.tasks, request.example_id)
        if request.recorded:
            return await rescore(self.env, task, request.recorded, name=self.settings.name)
        trace_ids: list[str] = []
        try:
            async with limit_time(self.settings.rollout_timeout_s, request):
                with self.stages.stage(Stage.GENERATING, num_rollouts=request.num_rollouts):
                    played = await play_group(lambda index: self._play(task, request, index, trace_ids), request)
            rollouts: list[Rollout] = []
            for index, (episode, num_retries) in enumerate(played):
                rollouts.append(to_rollout(episode, index, settings=self.settings, find_turn=self._turns.find))
                rollouts[-1].num_retries = num_retries
            return rollouts
        finally:
            for trace_id in trace_ids:
                self._turns.forget(trace_id)

    async def _play(self, task: Task, request: GroupRequest, index: int, trace_ids: list[str]) -> Any:
        """Play and score one episode. Add the ids of its traces to `trace_ids`; their turns must be forgotten after the group.

        Raises:
            RolloutFailed: the episode is not complete, or a reward function failed.
        """
        settings = self.settings
        arguments = request_arguments(request.sampling, seed=rollout_seed(request, index), is_plain=settings.is_plain)
        context = ModelContext(
            model=settings.model_name,
            client=self._make_client_config(request.base_url),
            sampling=Sampling.model_validate(arguments),
        )
        numbers = itertools.count()

        def begin_trace(trace: Trace) -> None:
            trace_ids.append(trace.id)
            self._turns.numbers[trace.id] = next(numbers)

        value_on_error = 0.0 if settings.on_reward_error == "zero" else None
        with collect_reward_errors(self.settings.name, value_on_error=value_on_error) as errors:
            [slot] = self.env.slots(task)
            run: Any = self.env.run_slot  # pyright reads the signature of verifiers 0.3.1
            episode = await run(slot, context, on_trace=begin_trace)
        if errors and value_on_error is None:
            raise errors[0]
        if not self.env.complete(episode):
            raise make_failure(episode)
        return episode

    def _make_client_config(self, base_url: str) -> ClientConfig:
        """Return the configuration of the clients of one server."""
        servers = self.settings.servers
        options = {
            "base_url": f"{server_root(base_url)}/v1",
            "api_key_var": servers.key_variable(base_url),
            "headers": servers.headers,
            "timeout": {"connect": min(_CONNECT_TIMEOUT_S, servers.timeout_s), "read": servers.timeout_s},
        }
        if self.settings.is_plain:
            return EvalClientConfig.model_validate(options)
        config = TrivetClientConfig.model_validate(options)
        config._turns, config._settings = self._turns, self.settings  # pyright: ignore[reportPrivateUsage]  pydantic's rule
        return config

    def example(self, *, split: Split, example_id: int) -> Example:
        """Return a task as an example."""
        data = self.tasks[example_id].data
        return Example(prompt=shorten_messages(task_messages(data)), answer=find_answer(data.model_dump(mode="json")))

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Run the interception endpoints and shared tool servers. Enter and leave it in one task, as verifiers requires."""
        env: Any = self.env  # pyright reads verifiers 0.3.1
        return env.serving()


class TrivetClientConfig(TrainClientConfig):
    """Configures a `TrivetClient`. Its base class makes verifiers expect complete answers with tokens."""

    _turns: ServedTurns = PrivateAttr()
    _settings: HostSettings = PrivateAttr()


class TrivetClient(EvalClient):
    """The client of one server. It records the tokens, log-probabilities and policy versions of each turn."""

    def __init__(self, config: TrivetClientConfig) -> None:
        """Make a client of the server that `config` names."""
        super().__init__(config)
        self._turns = config._turns
        self._model_name = config._settings.model_name
        self._keeps_tokens = config._settings.trajectory_strategy == "interleaved"

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Send a harness program's request to the server, record the turn of the answer, and return the answer.

        Raises:
            ProviderError: the request is no chat completion of a rollout, or the server refused it.
        """
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(
                f"the harness speaks the {type(dialect).__name__.removesuffix('Dialect')} API; only chat completions can be "
                "trained on: choose another with args.agent.harness.id",
                status_code=400,
            )
        if turn is None:
            raise ProviderError("a model request outside of a rollout cannot be trained on", status_code=400)
        request = {name: value for name, value in body.items() if name not in _STREAM_FIELDS}
        if request.get("seed") is not None:
            seed = later_seed(request["seed"], "trace", self._turns.numbers.get(turn.trace.id, 0))
            request["seed"] = later_seed(seed, "turn", turn.trace.num_turns)
        if self._keeps_tokens:
            messages = (turn.trace.nodes[node_id].message for node_id in reversed(turn.prefix_node_ids))
            # The newest turn that the prompt continues; None for the first turn.
            previous = next(filter(None, (self._turns.find(turn.trace.id, message) for message in messages)), None)
            if previous is not None:
                request["known_token_ids"] = [*previous.prompt_ids, *previous.completion_ids]
        try:
            response = await super().get_response(dialect, request, sampling, session_id, turn, headers)
        except ProviderError as exc:
            # A harness with compaction shortens a conversation that has become too long, and goes on.
            has_compaction = getattr(turn.trace.agent.config.harness, "compaction", None) is not None
            if exc.status_code == 400 and any(refusal in str(exc) for refusal in OVERLONG_REFUSALS) and not has_compaction:
                turn.trace.stop(OUT_OF_CONTEXT)
            raise
        answer = response.raw
        assert answer is not None
        if body["model"] == self._model_name and turn.trace.agent.trainable:
            try:
                answered_turn = read_turn(answer)
            except RolloutFailed as exc:
                raise ProviderError(str(exc), status_code=400) from exc
            self._turns.record(turn.trace.id, response.message, answered_turn)
            # verifiers' own views of the trace get the same tokens. Validation is skipped, because it would copy every token.
            response.tokens = TurnTokens.model_construct(
                prompt_ids=list(answered_turn.prompt_ids),
                completion_ids=list(answered_turn.completion_ids),
                completion_logprobs=list(answered_turn.logprobs),
            )
        # The harness program has no use for the tokens.
        choices = [{name: value for name, value in choice.items() if name not in _TOKEN_FIELDS} for choice in answer["choices"]]
        response.raw = {**{name: value for name, value in answer.items() if name != "prompt_token_ids"}, "choices": choices}
        return response


def use_trivet_clients() -> None:
    """Replace the functions with which verifiers' interception endpoints make clients. May be called again.

    For a `TrivetClientConfig` they then make a `TrivetClient`. A connection uses a proxy only if `is_direct` returns False.
    """
    original: Callable[[Any], Client] = interception_server.resolve_client
    if getattr(original, "makes_trivet_clients", False):
        return

    def resolve_client(config: Any) -> Client:
        return TrivetClient(config) if isinstance(config, TrivetClientConfig) else original(config)

    def build_async_httpx(config: Any) -> httpx.AsyncClient:
        timeout = httpx.Timeout(**config.timeout.model_dump())
        return httpx.AsyncClient(timeout=timeout, limits=DEFAULT_LIMITS, trust_env=not is_direct(config.base_url, os.environ))

    resolve_client.makes_trivet_clients = True  # type: ignore[attr-defined]  marks the function for a second call
    interception_server.resolve_client = resolve_client
    patched: Any = eval_client  # pyright reads verifiers 0.3.1, where clients are made elsewhere
    patched.build_async_httpx = build_async_httpx
