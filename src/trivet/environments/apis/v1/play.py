"""Answers group requests with one environment of the v1 API: tasks numbered like examples, one episode for each rollout.

verifiers catches every model request of a harness program at its interception endpoint, which calls a client. The client here sends
the program's own chat-completions request on to a trivet server, with the tokens of the turn that it continues. The server has the
tokenizer, the chat template and the tool parser, so a worker needs none of them, and what is trained on is what the server reports.
verifiers' own train client would tokenize the conversation itself, with a template of its own.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
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
from trivet.environments.apis.messages import find_example, shorten_messages
from trivet.environments.apis.rewards import collect_reward_errors
from trivet.environments.apis.turns import Turn, later_seed, read_turn, request_arguments, rollout_seed
from trivet.environments.apis.v1.score import OUT_OF_CONTEXT, incomplete, rescore, task_messages, to_rollout
from trivet.errors import RolloutFailed
from trivet.process.proxies import is_direct
from trivet.wire.groups import OVERLONG_REFUSALS, EnvironmentInfo, GroupRequest, Split, server_root
from trivet.wire.rollouts import Rollout
from trivet.wire.workers import HostSettings

_CONNECT_TIMEOUT_S = 30.0
"""verifiers' own: an address that does not exist is reported soon, whatever the limit of a request is."""
_STREAMED = ("stream", "stream_options")
_TOKEN_FIELDS = ("token_ids", "logprobs", "policy_versions")


class V1Host:
    """Implements `apis.load.EnvironmentHost` for verifiers 0.4 and newer."""

    api = "v1"

    def __init__(
        self, env: Env, tasks: Sequence[Task], settings: HostSettings, *, info: EnvironmentInfo, stages: StageBoard
    ) -> None:
        """Take a loaded environment and its tasks. They are both what is trained on and what is evaluated."""
        self._env = env
        self._tasks = tasks
        self._settings = settings
        self._turns = ServedTurns()
        self._stages = stages
        self.name = settings.name
        self.info = info

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Play and score the episodes of a group, or score recorded ones; see `EnvironmentHost.run_group`."""
        task = find_example(self._tasks, request.example_id)
        if request.recorded:
            return await rescore(self._env, task, request.recorded, name=self.name)
        trace_ids: list[str] = []
        try:
            async with limit_time(self._settings.rollout_timeout_s, request):
                with self._stages.stage(Stage.GENERATING, num_rollouts=request.num_rollouts):
                    played = await play_group(lambda index: self._play(task, request, index, trace_ids), request)
            rollouts: list[Rollout] = []
            for index, (episode, num_retries) in enumerate(played):
                rollouts.append(to_rollout(episode, index, settings=self._settings, find_turn=self._turns.find))
                rollouts[-1].num_retries = num_retries
            return rollouts
        finally:
            for trace_id in trace_ids:
                self._turns.forget(trace_id)

    async def _play(self, task: Task, request: GroupRequest, index: int, trace_ids: list[str]) -> Any:
        """Play and score one episode. Add the ids of its traces to `trace_ids`."""
        settings = self._settings
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
        with collect_reward_errors(self.name, value_on_error=value_on_error) as errors:
            [slot] = self._env.slots(task)
            run: Any = self._env.run_slot  # pyright reads the signature of verifiers 0.3.1
            episode = await run(slot, context, on_trace=begin_trace)
        if errors and value_on_error is None:
            raise errors[0]
        if not self._env.complete(episode):
            raise incomplete(episode)
        return episode

    def _make_client_config(self, base_url: str) -> ClientConfig:
        """Return the configuration of the clients of one server."""
        servers = self._settings.servers
        options = {
            "base_url": f"{server_root(base_url)}/v1",
            "api_key_var": servers.key_variable(base_url),
            "headers": servers.headers,
            "timeout": {"connect": min(_CONNECT_TIMEOUT_S, servers.timeout_s), "read": servers.timeout_s},
        }
        if self._settings.is_plain:
            return EvalClientConfig.model_validate(options)
        config = TrivetClientConfig.model_validate(options)
        config._turns, config._settings = self._turns, self._settings  # pyright: ignore[reportPrivateUsage]  pydantic's rule
        return config

    def prompt(self, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """Return the messages that a task starts with."""
        return shorten_messages(task_messages(self._tasks[example_id].data))

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Keep up what the environment serves: interception endpoints and shared tool servers. verifiers wants one task for it."""
        env: Any = self._env  # pyright reads verifiers 0.3.1
        return env.serving()


class ServedTurns:
    """The tokens behind the sampled messages of running episodes, by their trace and by the message that each turn sampled.

    verifiers puts the message object of an answer into its graph as it is, so the object itself names the turn. A message that an
    environment has rewritten is another object: its text was not sampled, and is not trained on.
    """

    def __init__(self) -> None:
        self._turns: dict[str, dict[int, tuple[Any, Turn]]] = {}
        self.numbers: dict[str, int] = {}
        """Says which trace of its episode each is, from 0: each needs seeds of its own."""

    def record(self, trace_id: str, message: Any, turn: Turn) -> None:
        """Keep `turn`, which sampled `message`."""
        # Holding the message keeps its id from being given to another object.
        self._turns.setdefault(trace_id, {})[id(message)] = (message, turn)

    def find(self, trace_id: str, message: Any) -> Turn | None:
        """Return the turn that sampled `message`; None when none did."""
        found = self._turns.get(trace_id, {}).get(id(message))
        return None if found is None else found[1]

    def forget(self, trace_id: str) -> None:
        """Drop a trace. May be called again."""
        self._turns.pop(trace_id, None)
        self.numbers.pop(trace_id, None)

    def __len__(self) -> int:
        """Return the number of traces that are kept."""
        return len(self._turns.keys() | self.numbers.keys())


class TrivetClientConfig(TrainClientConfig):
    """Names a trivet server in the context of an episode. verifiers treats it as one that answers whole and reports tokens."""

    _turns: ServedTurns = PrivateAttr()
    _settings: HostSettings = PrivateAttr()


class TrivetClient(EvalClient):
    """The client of one server. It records the tokens, log-probabilities and policy versions of each turn."""

    def __init__(self, config: TrivetClientConfig) -> None:
        """Make the connections."""
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
        """Complete one turn."""
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(
                f"the harness speaks the {type(dialect).__name__.removesuffix('Dialect')} API; only chat completions can be "
                "trained on: choose another with args.agent.harness.id",
                status_code=400,
            )
        if turn is None:
            raise ProviderError("a model request outside of a rollout cannot be trained on", status_code=400)
        asked = {name: value for name, value in body.items() if name not in _STREAMED}
        if asked.get("seed") is not None:
            seed = later_seed(asked["seed"], "trace", self._turns.numbers.get(turn.trace.id, 0))
            asked["seed"] = later_seed(seed, "turn", turn.trace.num_turns)
        if self._keeps_tokens:  # those of the last turn that the prompt continues, as read and sampled
            messages = (turn.trace.nodes[node_id].message for node_id in reversed(turn.prefix_node_ids))
            if (
                known := next(filter(None, (self._turns.find(turn.trace.id, message) for message in messages)), None)
            ) is not None:
                asked["known_token_ids"] = [*known.prompt_ids, *known.completion_ids]
        try:
            response = await super().get_response(dialect, asked, sampling, session_id, turn, headers)
        except ProviderError as exc:
            # A harness that compacts shortens a conversation that has become too long, and goes on.
            compacts = getattr(turn.trace.agent.config.harness, "compaction", None) is not None
            if exc.status_code == 400 and any(refusal in str(exc) for refusal in OVERLONG_REFUSALS) and not compacts:
                turn.trace.stop(OUT_OF_CONTEXT)
            raise
        answer = response.raw
        assert answer is not None
        if body["model"] == self._model_name and turn.trace.agent.trainable:
            try:
                served = read_turn(answer)
            except RolloutFailed as exc:
                raise ProviderError(str(exc), status_code=400) from exc
            self._turns.record(turn.trace.id, response.message, served)
            # Built without validation, which would copy every token. verifiers' own views of the trace then have the same tokens.
            response.tokens = TurnTokens.model_construct(
                prompt_ids=list(served.prompt_ids),
                completion_ids=list(served.completion_ids),
                completion_logprobs=list(served.logprobs),
            )
        # The harness program has no use for the tokens.
        choices = [{name: value for name, value in choice.items() if name not in _TOKEN_FIELDS} for choice in answer["choices"]]
        response.raw = {**{name: value for name, value in answer.items() if name != "prompt_token_ids"}, "choices": choices}
        return response


def use_trivet_clients() -> None:
    """Have verifiers' interception endpoints make a `TrivetClient` for a `TrivetClientConfig`, on connections that use a proxy only
    where `is_direct` says no. May be called again.
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
