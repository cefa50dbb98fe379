"""Asks an inference server for the model turns of v1 episodes, and keeps the tokens that verifiers would drop.

verifiers catches every model request of a harness program at its interception endpoint, which calls a client. This client sends
the program's own chat-completions request on to a trivet server, with the tokens of the turn that it continues. The server has the
tokenizer, the chat template and the tool parser, so a worker needs none of them, and what is trained on is what the server reports.
verifiers' own train client would tokenize the conversation itself, with a template of its own.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from pydantic import PrivateAttr
from verifiers.v1.clients import Client, EvalClient, TrainClientConfig
from verifiers.v1.clients import eval as eval_client
from verifiers.v1.clients.base import DEFAULT_LIMITS
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import server as interception_server
from verifiers.v1.types import Response, SamplingConfig, TurnTokens

from trivet.environments.apis.requests import trace_seed, turn_seed
from trivet.environments.apis.trajectories import read_turn
from trivet.environments.apis.v1.served_turns import ServedTurns
from trivet.errors import RolloutFailed
from trivet.process.proxies import is_direct
from trivet.wire.servers import OVERLONG_REFUSALS

OUT_OF_CONTEXT = "context_length"
"""The stop condition of a trace whose next prompt is longer than the model's context."""

_STREAMED = ("stream", "stream_options")
_TOKEN_FIELDS = ("token_ids", "logprobs", "policy_versions")


class TrivetClientConfig(TrainClientConfig):
    """Names a trivet server in the context of an episode. verifiers treats it as one that answers whole and reports tokens."""

    _turns: ServedTurns = PrivateAttr()
    _model_name: str = PrivateAttr()
    _keeps_tokens: bool = PrivateAttr()

    @classmethod
    def for_policy(
        cls, options: Mapping[str, Any], *, turns: ServedTurns, model_name: str, keeps_tokens: bool
    ) -> "TrivetClientConfig":
        """Return the configuration of the clients that ask for the policy.

        Args:
            options: fields of verifiers' own configuration: address, key, headers, time limits.
            turns: gets the tokens of every turn.
            keeps_tokens: a turn begins with the tokens of the turn that it continues, where the chat template allows it.
        """
        config = cls.model_validate(dict(options))
        config._turns, config._model_name, config._keeps_tokens = turns, model_name, keeps_tokens
        return config

    def make_client(self) -> "TrivetClient":
        """Return a client of the server."""
        return TrivetClient(self, turns=self._turns, model_name=self._model_name, keeps_tokens=self._keeps_tokens)


class TrivetClient(EvalClient):
    """The client of one server. It records the tokens, log-probabilities and policy versions of each turn."""

    def __init__(self, config: TrainClientConfig, *, turns: ServedTurns, model_name: str, keeps_tokens: bool) -> None:
        """Make the connections; see `TrivetClientConfig.for_policy`."""
        super().__init__(config)
        self._turns = turns
        self._model_name = model_name
        self._keeps_tokens = keeps_tokens

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Complete one turn.

        Raises:
            ProviderError: the server refused, cannot be reached, or answered without tokens.
        """
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(
                f"the harness speaks the {type(dialect).__name__.removesuffix('Dialect')} API; only chat completions can be "
                "trained on: choose another with args.agent.harness.id",
                status_code=400,
            )
        if turn is None:
            raise ProviderError("a model request outside of a rollout cannot be trained on", status_code=400)
        try:
            response = await super().get_response(dialect, self._asked(body, turn), sampling, session_id, turn, headers)
        except ProviderError as exc:
            if exc.status_code == 400 and any(refusal in str(exc) for refusal in OVERLONG_REFUSALS) and not _compacts(turn):
                turn.trace.stop(OUT_OF_CONTEXT)
            raise
        if body["model"] == self._model_name and turn.trace.agent.trainable:
            self._record(turn, response)
        assert response.raw is not None
        response.raw = _without_tokens(response.raw)
        return response

    def _asked(self, body: dict[str, Any], turn: PendingTurn) -> dict[str, Any]:
        asked = {name: value for name, value in body.items() if name not in _STREAMED}
        if asked.get("seed") is not None:
            seed = trace_seed(asked["seed"], self._turns.number(turn.trace.id))
            asked["seed"] = turn_seed(seed, turn.trace.num_turns)
        if self._keeps_tokens and (known := self._known_tokens(turn)):
            asked["known_token_ids"] = known
        return asked

    def _known_tokens(self, turn: PendingTurn) -> list[int] | None:
        """Return the tokens of the last turn that the prompt continues, as read and sampled; None when it continues none."""
        for node_id in reversed(turn.prefix_node_ids):
            served = self._turns.find(turn.trace.id, turn.trace.nodes[node_id].message)
            if served is not None:
                return [*served.prompt_ids, *served.completion_ids]
        return None

    def _record(self, turn: PendingTurn, response: Response) -> None:
        assert response.raw is not None
        try:
            served = read_turn(response.raw)
        except RolloutFailed as exc:
            raise ProviderError(str(exc), status_code=400) from exc
        self._turns.record(turn.trace.id, response.message, served)
        # Built without validation, which would copy every token. verifiers' own views of the trace then have the same tokens.
        response.tokens = TurnTokens.model_construct(
            prompt_ids=list(served.prompt_ids),
            completion_ids=list(served.completion_ids),
            completion_logprobs=list(served.logprobs),
        )


def _compacts(turn: PendingTurn) -> bool:
    """Return whether the harness shortens a conversation that has become too long, and goes on."""
    return getattr(turn.trace.agent.config.harness, "compaction", None) is not None


def _without_tokens(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer for the harness program, which has no use for the tokens."""
    choices = [{name: value for name, value in choice.items() if name not in _TOKEN_FIELDS} for choice in answer["choices"]]
    return {**{name: value for name, value in answer.items() if name != "prompt_token_ids"}, "choices": choices}


def use_trivet_clients() -> None:
    """Have verifiers' interception endpoints make a `TrivetClient` for a `TrivetClientConfig`, on connections that use a proxy only
    where `is_direct` says no. May be called again.
    """
    original: Callable[[Any], Client] = interception_server.resolve_client
    if getattr(original, "makes_trivet_clients", False):
        return

    def resolve_client(config: Any) -> Client:
        return config.make_client() if isinstance(config, TrivetClientConfig) else original(config)

    def build_async_httpx(config: Any) -> httpx.AsyncClient:
        timeout = httpx.Timeout(**config.timeout.model_dump())
        return httpx.AsyncClient(timeout=timeout, limits=DEFAULT_LIMITS, trust_env=not is_direct(config.base_url, os.environ))

    resolve_client.makes_trivet_clients = True  # type: ignore[attr-defined]  marks the function for a second call
    interception_server.resolve_client = resolve_client
    patched: Any = eval_client  # pyright reads verifiers 0.3.1, where clients are made elsewhere
    patched.build_async_httpx = build_async_httpx
