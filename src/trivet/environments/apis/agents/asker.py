"""Asks an inference server for the completions of agents, with the tokens that are trained on."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from trivet.environments.apis.agents.formats import ModelRequest
from trivet.environments.apis.messages import describe
from trivet.environments.apis.turns import request_arguments
from trivet.errors import RolloutFailed
from trivet.process.proxies import is_direct
from trivet.wire.groups import OVERLONG_REFUSALS, SamplingArguments, server_root
from trivet.wire.workers import HostSettings

OVERLONG = "OverlongPrompt"
"""Kind of the failure of a request that is longer than the context."""


class ServerAsker:
    """Connections to the servers of one environment."""

    def __init__(self, settings: HostSettings, environ: Mapping[str, str], http: httpx.AsyncClient) -> None:
        self._settings = settings
        self._environ = environ
        self._http = http

    async def complete(
        self, asked: ModelRequest, sampling: SamplingArguments, *, base_url: str, seed: int | None, known: Sequence[int]
    ) -> dict[str, Any]:
        """Return the JSON of a chat completion. The sampling of the run holds, not the agent's; the lower limit of tokens counts.

        Args:
            known: the tokens that begin the conversation, as the model read and sampled them.

        Raises:
            RolloutFailed: the server cannot be reached, or refused.
        """
        settings = self._settings
        arguments = request_arguments(sampling, seed=seed)
        body: dict[str, Any] = {"model": settings.model_name, "messages": asked.messages, **arguments.pop("extra_body")}
        body |= {name: value for name, value in arguments.items() if value is not None}
        body |= {name: value for name, value in (("tools", asked.tools), ("stop", asked.stop)) if value}
        if limits := [limit for limit in (body.get("max_tokens"), asked.max_tokens) if limit is not None]:
            body["max_tokens"] = min(limits)
        if known and settings.trajectory_strategy == "interleaved":
            body["known_token_ids"] = list(known)
        key = settings.servers.api_key(base_url, self._environ)
        headers = {**settings.servers.headers, **({"Authorization": f"Bearer {key}"} if key else {})}
        try:
            answer = await self._http.post(f"{server_root(base_url)}/v1/chat/completions", json=body, headers=headers)
        except httpx.HTTPError as exc:
            raise RolloutFailed(describe(exc), kind=type(exc).__name__, is_infrastructure=True) from exc
        if answer.is_success:
            return answer.json()
        is_overlong = any(refusal in answer.text for refusal in OVERLONG_REFUSALS)
        raise RolloutFailed(
            f"the server answered with {answer.status_code}: {answer.text[:500]}",
            kind=OVERLONG if is_overlong else "ServerError",
            is_infrastructure=answer.status_code >= 500 or answer.status_code == 429,
        )


@asynccontextmanager
async def open_asker(settings: HostSettings, environ: Mapping[str, str]) -> AsyncIterator[ServerAsker]:
    """Open connections for a block. The proxies that `environ` names are used where `is_direct` says so."""
    near = is_direct(settings.servers.base_urls[0], environ)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=settings.servers.timeout_s, trust_env=not near, limits=limits) as http:
        yield ServerAsker(settings, environ, http)
