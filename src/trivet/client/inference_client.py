"""Asks an inference server of ours which policy it serves, to load another, and for tokens.

The orchestrator, `eval` and the tests go through here. Chat completions of environments do not: verifiers sends those
itself (environments.apis).
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import msgspec

from trivet.errors import ConfigError, InferenceError, InferenceTimeout, PolicyRefused, ServerGone
from trivet.process.proxies import PROXY_ERRORS
from trivet.storage.durable import DECODE_ERRORS
from trivet.wire.groups import server_root
from trivet.wire.versions import PolicyStatus, VersionRun

_POLL_INTERVAL_S = 0.5
"""Between two questions whether a server is ready."""
_REASON_CHARS = 500
"""An answer that is no reason of ours is quoted up to this length."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A completion with the policy versions that sampled it."""

    token_ids: list[int]
    logprobs: list[float]
    """One per token, as sampled, temperature applied."""
    versions: list[VersionRun]
    """Cover the tokens."""
    prompt_ids: list[int] = []
    """Tokens that the model read, for a completion of messages."""


_LOAD = re.compile(r"^vllm:num_(requests_running|requests_waiting|preemptions_total)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """Sums over the engines of one server."""

    num_running: int
    """Sequences in the batch being computed."""
    num_waiting: int
    """Requests that have no place in it yet."""
    num_preemptions: int
    """Sequences thrown out of the cache since the server started: each is computed again."""


def read_load(text: str) -> ServerLoad | None:
    """Return the load that an answer of `/metrics` in Prometheus' text form describes; None when a number is missing."""
    values: dict[str, float] = {}
    for name, value in _LOAD.findall(text):
        values[name] = values.get(name, 0.0) + float(value)
    if len(values) < len(fields(ServerLoad)):
        return None
    return ServerLoad(
        num_running=int(values["requests_running"]),
        num_waiting=int(values["requests_waiting"]),
        num_preemptions=int(values["preemptions_total"]),
    )


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    policy_versions: list[VersionRun]
    logprobs: _Logprobs


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None

    @property
    def generation(self) -> Generation:
        [choice, *_] = self.choices
        logprobs = [token.logprob for token in choice.logprobs.content]
        prompt_ids = self.prompt_token_ids or []
        return Generation(token_ids=choice.token_ids, logprobs=logprobs, versions=choice.policy_versions, prompt_ids=prompt_ids)


class _Scored(msgspec.Struct):
    prompt_logprobs: list[dict[str, _TokenLogprob] | None]
    """By token id, as text; None for the first token, which nothing predicts."""


class _Scores(msgspec.Struct):
    choices: list[_Scored]


class _Tokens(msgspec.Struct):
    tokens: list[int]
    max_model_len: int | None = None


class _Text(msgspec.Struct):
    prompt: str


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


AnswerT = TypeVar("AnswerT", bound=msgspec.Struct)


class InferenceClient:
    """A connection to one inference server."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float,
        find_token: Callable[[], str | None] = lambda: None,
        headers: Mapping[str, str] | None = None,
        is_direct: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Make a client; nothing is asked yet.

        Args:
            base_url: with or without `/v1`.
            timeout_s: longest time for one request.
            find_token: the token of the run's secret, asked for when the server is to change; no other request carries it.
            headers: sent with every request.
            is_direct: ask without the proxies that this process's variables name; False for a service of others.
            transport: for tests; unset: TCP.

        Raises:
            ConfigError: the variables name a proxy that cannot be used.
        """
        self.base_url = server_root(base_url)
        self._timeout_s = timeout_s
        self._find_token = find_token
        self._clock = clock
        self._sleep = sleep
        try:
            self._http = httpx.AsyncClient(
                base_url=self.base_url, timeout=timeout_s, headers=headers, transport=transport, trust_env=not is_direct
            )
        except PROXY_ERRORS as exc:
            raise ConfigError(f"{self.base_url} cannot be asked through the proxy of this machine's variables: {exc}") from exc

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once the server's engine answers.

        Raises:
            InferenceError: it did not within `timeout_s`; says what the last attempt met.
        """
        deadline = self._clock() + timeout_s
        while True:
            try:
                await self.check_health(timeout_s=max(deadline - self._clock(), _POLL_INTERVAL_S))
                return
            except InferenceError as exc:
                if self._clock() >= deadline:
                    raise InferenceError(
                        f"{self.base_url} was not ready within {timeout_s:.0f} s: {exc}; is the inference server running "
                        "(logs/inference.stdout), and does client.base_url name it?"
                    ) from exc
            await self._sleep(_POLL_INTERVAL_S)

    async def check_health(self, *, timeout_s: float) -> None:
        """Returns when the server's engine answers.

        Raises:
            InferenceError: it does not, or not in time.
        """
        await self._request("GET", "/health", timeout_s=timeout_s)

    async def served_policy(self, *, timeout_s: float | None = None) -> PolicyStatus:
        """Ask which policy the server serves."""
        return await self._ask("GET", "/policy", PolicyStatus, timeout_s=timeout_s)

    async def serves_policies(self, *, timeout_s: float) -> bool:
        """Ask whether the server is `uv run inference`. Another OpenAI-compatible server never changes its weights.

        Raises:
            InferenceError: it does not answer, or not now.
        """
        response = await self._send("GET", "/policy", timeout_s=timeout_s)
        if response.is_server_error:
            raise InferenceError(f"GET {self.base_url}/policy was answered with {response.status_code}: {_reason(response)}")
        try:
            msgspec.json.decode(response.content, type=PolicyStatus)
        except DECODE_ERRORS:
            return False
        return response.is_success

    async def server_load(self) -> ServerLoad | None:
        """Ask how busy the server is; None when it does not say."""
        return read_load((await self._request("GET", "/metrics")).text)

    async def update_weights(self, directory: Path) -> PolicyStatus:
        """Have the server load the published weights in `directory`, which it must see under the same path.

        Raises:
            PolicyRefused: the directory is not whole.
        """
        return await self._ask(
            "POST", "/update_weights", PolicyStatus, body={"weight_dir": _absolute(directory)}, token=self._find_token()
        )

    async def reload_weights(self) -> PolicyStatus:
        """Have the server go back to the start weights, version 0."""
        return await self._ask("POST", "/reload_weights", PolicyStatus, token=self._find_token())

    async def sleep(self) -> None:
        """Have the server free its GPU memory until it loads the next policy. A second call changes nothing.

        Raises:
            PolicyRefused: the server was started without `inference.sleep_while_training`.
            ServerGone: nothing listens at its address.
        """
        await self._request("POST", "/sleep", token=self._find_token())

    async def model_name(self) -> str:
        """Ask for the name that requests must give; a server of ours names it first."""
        return (await self.model_names())[0]

    async def model_names(self) -> list[str]:
        """Ask for the names that requests may give as their model, at least one."""
        models = await self._ask("GET", "/v1/models", _Models)
        if not models.data:
            raise InferenceError(f"GET {self.base_url}/v1/models names no model")
        return [model.id for model in models.data]

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None = None
    ) -> Generation:
        """Tokens in, tokens out: the prompt is not touched by any template.

        Args:
            temperature: 0 takes the likeliest token each time.
        """
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "logprobs": 0}
        body = {"token_ids": list(token_ids), "sampling_params": sampling}
        return (await self._ask("POST", "/inference/v1/generate", _Answer, body=body)).generation

    async def complete_chat(
        self, messages: Sequence[Mapping[str, Any]], *, model: str, fields: Mapping[str, Any]
    ) -> Generation:
        """Complete messages under the server's chat template.

        Args:
            fields: further ones of the request's body, such as `temperature`.

        Raises:
            InferenceError: the server refused, or does not say what the model read.
        """
        asked = {"messages": list(messages), "model": model, "logprobs": True, "return_token_ids": True, **fields}
        answer = await self._ask("POST", "/v1/chat/completions", _Answer, body=asked)
        if not answer.prompt_token_ids:
            raise InferenceError(
                f"{self.base_url} answered a chat completion without prompt_token_ids; is it `uv run inference`?"
            )
        return answer.generation

    async def score(self, token_ids: Sequence[int], *, model: str) -> list[float]:
        """Have the server's model score tokens that someone else sampled. Any vLLM server answers, not only ours.

        Returns:
            The log-probability of each token given those before it, at temperature 1; 0 for the first.

        Raises:
            InferenceError: it refused, for one because there is no room for one more token, or left tokens out.
        """
        # The answer has to be for a completion; its one token is thrown away.
        body = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = await self._ask("POST", "/v1/completions", _Scores, body=body)
        scored = answer.choices[0].prompt_logprobs if answer.choices else []
        found = [entry.get(str(token)) for entry, token in zip(scored[1:], token_ids[1:], strict=False) if entry is not None]
        values = [0.0, *(token.logprob for token in found if token is not None)]
        if len(values) != len(token_ids):
            raise InferenceError(
                f"{self.base_url} scored {len(values) - 1} of {len(token_ids) - 1} tokens; it must be a vLLM server, which answers "
                "`prompt_logprobs` of /v1/completions"
            )
        return values

    async def count_tokens(self, messages: Sequence[Mapping[str, Any]], *, model: str) -> tuple[int, int | None]:
        """Return the tokens of messages under the server's chat template, and the tokens of its context if it says them."""
        answer = await self._ask("POST", "/tokenize", _Tokens, body={"model": model, "messages": list(messages)})
        return len(answer.tokens), answer.max_model_len

    async def tokenize(self, text: str | Sequence[Mapping[str, Any]], *, model: str) -> list[int]:
        """Return the token ids of a plain text, or of messages under the server's chat template."""
        body = {"prompt": text, "add_special_tokens": False} if isinstance(text, str) else {"messages": list(text)}
        return (await self._ask("POST", "/tokenize", _Tokens, body={"model": model, **body})).tokens

    async def detokenize(self, token_ids: Sequence[int], *, model: str) -> str:
        """Return the text of `token_ids`."""
        return (await self._ask("POST", "/detokenize", _Text, body={"model": model, "tokens": list(token_ids)})).prompt

    async def aclose(self) -> None:
        """Close the connection. May be called again."""
        await self._http.aclose()

    async def _ask(self, method: str, path: str, kind: type[AnswerT], **options: Any) -> AnswerT:
        response = await self._request(method, path, **options)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except DECODE_ERRORS as exc:
            raise InferenceError(
                f"{method} {self.base_url}{path} answered what is not a {kind.__name__.lstrip('_')} ({exc}): "
                f"{response.text[:_REASON_CHARS]}; is it `uv run inference`?"
            ) from exc

    async def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        response = await self._send(method, path, **options)
        if response.is_error:
            kind = PolicyRefused if response.status_code == int(httpx.codes.CONFLICT) else InferenceError
            raise kind(f"{method} {self.base_url}{path} was answered with {response.status_code}: {_reason(response)}")
        return response

    async def _send(
        self,
        method: str,
        path: str,
        *,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        token: str | None = None,
    ) -> httpx.Response:
        limit_s = min(self._timeout_s, timeout_s or self._timeout_s)
        request = f"{method} {self.base_url}{path}"
        headers = {"Authorization": f"Bearer {token}"} if token else None
        try:
            async with asyncio.timeout(limit_s):
                return await self._http.request(method, path, json=body, timeout=limit_s, headers=headers)
        except (TimeoutError, httpx.TimeoutException) as exc:
            raise InferenceTimeout(f"{request} was not answered within {limit_s:.0f} s") from exc
        except httpx.HTTPError as exc:
            kind = ServerGone if _was_refused(exc) else InferenceError
            raise kind(f"{request} failed: {type(exc).__name__}: {exc}") from exc


def _absolute(directory: Path) -> str:
    return str(directory.absolute())


def _was_refused(error: BaseException | None) -> bool:
    """Return whether the host refused every connection. Another error, such as a failed name lookup, says nothing about it."""
    while error is not None:
        if isinstance(error, ExceptionGroup):  # one error for each address of the host
            return all(_was_refused(cause) for cause in cast("ExceptionGroup[Exception]", error).exceptions)
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _reason(response: httpx.Response) -> str:
    """Return the reason that the server gives: ours say `reason`, vLLM `error.message`."""
    with suppress(ValueError):
        match response.json():
            case {"reason": str(reason)} | {"error": {"message": str(reason)}}:
                return reason
            case _:
                pass
    return response.text[:_REASON_CHARS]
