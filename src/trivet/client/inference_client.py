"""Sends requests to one inference server: which policy it serves, to load another policy, to generate and score tokens.

The orchestrator, `eval` and the tests use this client. Environments do not: verifiers sends their chat completions itself
(`environments.apis`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import msgspec

from trivet.client.server_load import ServerLoad, read_load
from trivet.config.schema.inference import ClientConfig
from trivet.errors import ConfigError, InferenceError, InferenceTimeout, PolicyRefused, ServerGone
from trivet.process.proxies import PROXY_ERRORS, is_direct
from trivet.storage.durable import DECODE_ERRORS
from trivet.wire.groups import server_root
from trivet.wire.versions import FetchablePolicy, PolicyStatus, TransferRound, VersionRun

_POLL_INTERVAL_S = 0.5
"""Seconds between two questions whether a server is ready."""
_MAX_QUOTED_CHARS = 500
"""The most characters of an answer of unknown form that an error message quotes."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A completion with the policy versions that sampled it."""

    token_ids: list[int]
    logprobs: list[float]
    """One per token, with the temperature applied, as it was sampled."""
    versions: list[VersionRun]
    """The policy versions of the tokens, in runs whose lengths add up to the number of tokens."""
    prompt_ids: list[int] = []
    """The tokens that the model read; empty for a prompt given as token ids."""


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    policy_versions: list[VersionRun]
    logprobs: _Logprobs


class _Answer(msgspec.Struct):
    """The fields that are used of an answer to a generate request or a chat completion."""

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
    """For each token, log-probabilities by token id as text; None for the first token, which nothing predicts."""


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
        """Make a client. No request is sent yet.

        Args:
            base_url: with or without `/v1`.
            timeout_s: longest time for one request.
            find_token: returns the token of the run's secret. It is called for requests that change the server; no others carry it.
            headers: sent with every request.
            is_direct: ignore the proxies that environment variables name, as `process.proxies.is_direct` decides for the address.
            transport: for tests; None: TCP.

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
        """Wait until the server's engine answers.

        Raises:
            InferenceError: it did not answer within `timeout_s`; the message has the error of the last attempt.
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
        """Ask once whether the server's engine answers.

        Raises:
            InferenceError: it does not answer, or not in time.
        """
        await self._request("GET", "/health", timeout_s=timeout_s)

    async def served_policy(self, *, timeout_s: float | None = None) -> PolicyStatus:
        """Ask which policy the server serves."""
        return await self._ask("GET", "/policy", PolicyStatus, timeout_s=timeout_s)

    async def serves_policies(self, *, timeout_s: float) -> bool:
        """Return whether the server is a trivet server (`uv run inference`). Other OpenAI-compatible servers have no GET /policy.

        Raises:
            InferenceError: the server does not answer, or answers with a status of 500 or more.
        """
        response = await self._send("GET", "/policy", timeout_s=timeout_s)
        if response.is_server_error:
            raise InferenceError(
                f"GET {self.base_url}/policy was answered with {response.status_code}: {_read_reason(response)}"
            )
        try:
            msgspec.json.decode(response.content, type=PolicyStatus)
        except DECODE_ERRORS:
            return False
        return response.is_success

    async def server_load(self) -> ServerLoad | None:
        """Ask for the server's load; return None when it does not report all numbers."""
        return read_load((await self._request("GET", "/metrics")).text)

    async def update_weights(self, directory: Path, *, transfer: TransferRound | None = None) -> PolicyStatus:
        """Make the server load the published policy in `directory`, which must have the same path on the server's machine.

        Args:
            transfer: the round in which the trainer sends the policy.

        Raises:
            PolicyRefused: the server refuses the policy, for example because its directory is not whole.
        """
        body: dict[str, Any] = {"weight_dir": str(directory.absolute())}  # noqa: ASYNC240  reads only the working directory
        if transfer is not None:
            body["transfer"] = msgspec.to_builtins(transfer)
        return await self._ask("POST", "/update_weights", PolicyStatus, body=body, token=self._find_token())

    async def fetch_weights(self, policy: FetchablePolicy) -> PolicyStatus:
        """Make the server fetch a published policy from its sources, and load it. It generates until it has all of the policy.

        A large policy takes minutes. So the server answers every few seconds meanwhile, and each request has the usual time limit.
        """
        body = {**msgspec.structs.asdict(policy), "sources": [root for root in policy.sources if root != self.base_url]}
        while True:
            status = await self._ask("POST", "/update_weights", PolicyStatus, body=body, token=self._find_token())
            if not status.is_fetching:
                return status

    async def reload_weights(self) -> PolicyStatus:
        """Make the server go back to the start model, version 0."""
        return await self._ask("POST", "/reload_weights", PolicyStatus, token=self._find_token())

    async def sleep(self) -> None:
        """Make the server free its GPU memory until it loads the next policy. A second call changes nothing.

        Raises:
            PolicyRefused: the server was started without `inference.sleep_while_training`.
            ServerGone: nothing listens at its address.
        """
        await self._request("POST", "/sleep", token=self._find_token())

    async def model_name(self) -> str:
        """Ask for the name that requests must give as their model: the first name. A trivet server lists its policy first."""
        return (await self.model_names())[0]

    async def model_names(self) -> list[str]:
        """Ask for the names that requests may give as their model. There is at least one."""
        models = await self._ask("GET", "/v1/models", _Models)
        if not models.data:
            raise InferenceError(f"GET {self.base_url}/v1/models names no model")
        return [model.id for model in models.data]

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None = None
    ) -> Generation:
        """Generate tokens after `token_ids`, without a chat template.

        Args:
            temperature: 0 takes the most likely token each time.
        """
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "logprobs": 0}
        body = {"token_ids": list(token_ids), "sampling_params": sampling}
        return (await self._ask("POST", "/inference/v1/generate", _Answer, body=body)).generation

    async def complete_chat(
        self, messages: Sequence[Mapping[str, Any]], *, model: str, fields: Mapping[str, Any]
    ) -> Generation:
        """Complete messages under the server's chat template.

        Args:
            fields: further fields of the request's body, such as `temperature`.

        Raises:
            InferenceError: the server refused, or its answer lacks the tokens that the model read.
        """
        body = {"messages": list(messages), "model": model, "logprobs": True, "return_token_ids": True, **fields}
        answer = await self._ask("POST", "/v1/chat/completions", _Answer, body=body)
        if not answer.prompt_token_ids:
            raise InferenceError(
                f"{self.base_url} answered a chat completion without prompt_token_ids; is it `uv run inference`?"
            )
        return answer.generation

    async def score(self, token_ids: Sequence[int], *, model: str) -> list[float]:
        """Compute the log-probabilities of given tokens, for example of another model's. Any vLLM server can, not only trivet's.

        Returns:
            The log-probability of each token given the tokens before it, at temperature 1; 0 for the first token.

        Raises:
            InferenceError: the server refused, for example because one more token would not fit, or left tokens out.
        """
        # The API requires a completion of at least one token. That token is thrown away.
        body = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = await self._ask("POST", "/v1/completions", _Scores, body=body)
        entries = answer.choices[0].prompt_logprobs if answer.choices else []
        scored = [entry.get(str(token)) for entry, token in zip(entries[1:], token_ids[1:], strict=False) if entry is not None]
        values = [0.0, *(token.logprob for token in scored if token is not None)]
        if len(values) != len(token_ids):
            raise InferenceError(
                f"{self.base_url} scored {len(values) - 1} of {len(token_ids) - 1} tokens; it must be a vLLM server, which answers "
                "`prompt_logprobs` of /v1/completions"
            )
        return values

    async def count_tokens(self, messages: Sequence[Mapping[str, Any]], *, model: str) -> tuple[int, int | None]:
        """Return the number of tokens of messages under the server's chat template, and the length of the model's context.

        The length of the context is None if the server does not report it.
        """
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

    async def _ask(self, method: str, path: str, answer_type: type[AnswerT], **options: Any) -> AnswerT:
        """Send a request, refuse answers with an error status, and return the decoded answer. `options` are those of `_send`."""
        response = await self._request(method, path, **options)
        try:
            return msgspec.json.decode(response.content, type=answer_type)
        except DECODE_ERRORS as exc:
            raise InferenceError(
                f"{method} {self.base_url}{path} answered what is not a {answer_type.__name__.lstrip('_')} ({exc}): "
                f"{response.text[:_MAX_QUOTED_CHARS]}; is it `uv run inference`?"
            ) from exc

    async def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request and refuse answers with an error status. `options` are those of `_send`."""
        response = await self._send(method, path, **options)
        if response.is_error:
            error_type = PolicyRefused if response.status_code == int(httpx.codes.CONFLICT) else InferenceError
            raise error_type(
                f"{method} {self.base_url}{path} was answered with {response.status_code}: {_read_reason(response)}"
            )
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
        """Send a request and return the answer, whatever its status.

        Raises:
            InferenceTimeout: no answer came in time.
            ServerGone: every connection was refused.
            InferenceError: another error of the connection.
        """
        limit_s = min(self._timeout_s, timeout_s or self._timeout_s)
        request = f"{method} {self.base_url}{path}"
        headers = {"Authorization": f"Bearer {token}"} if token else None
        try:
            async with asyncio.timeout(limit_s):
                return await self._http.request(method, path, json=body, timeout=limit_s, headers=headers)
        except (TimeoutError, httpx.TimeoutException) as exc:
            raise InferenceTimeout(f"{request} was not answered within {limit_s:.0f} s") from exc
        except httpx.HTTPError as exc:
            error_type = ServerGone if _is_refused(exc) else InferenceError
            raise error_type(f"{request} failed: {type(exc).__name__}: {exc}") from exc


async def ask_model_name(base_url: str, *, environ: Mapping[str, str], timeout_s: float) -> str:
    """Return the `model_name` of the server at `base_url`, once it answers.

    Raises:
        InferenceError: it did not answer within `timeout_s`.
    """
    headers = ClientConfig(base_url=[base_url]).request_headers(base_url, environ)
    client = InferenceClient(base_url, timeout_s=timeout_s, headers=headers, is_direct=is_direct(base_url, environ))
    try:
        await client.wait_ready(timeout_s)
        return await client.model_name()
    finally:
        await client.aclose()


def _is_refused(error: BaseException | None) -> bool:
    """Return whether the cause of `error` is that the host refused the connection, at each of its addresses."""
    while error is not None:
        if isinstance(error, ExceptionGroup):  # one error for each address of the host
            return all(_is_refused(cause) for cause in cast("ExceptionGroup[Exception]", error).exceptions)
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _read_reason(response: httpx.Response) -> str:
    """Return the reason in an answer with an error: `reason` of trivet's routes, `error.message` of vLLM's, else the text."""
    with suppress(ValueError):
        match response.json():
            case {"reason": str(reason)} | {"error": {"message": str(reason)}}:
                return reason
            case _:
                pass
    return response.text[:_MAX_QUOTED_CHARS]
