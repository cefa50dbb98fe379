"""Requests the completions of agents from an inference server, with the tokens that are trained on."""

import functools
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from trivet.environments.apis.agents.formats import ModelRequest
from trivet.environments.apis.messages import describe
from trivet.environments.apis.turns import later_seed, request_arguments
from trivet.errors import RolloutFailed
from trivet.process.proxies import is_direct
from trivet.wire.groups import OVERLONG_REFUSALS, SamplingArguments, server_root
from trivet.wire.workers import HostSettings

OVERLONG = "OverlongPrompt"
"""Kind of the failure of a request that is longer than the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionClient:
    """Requests the completions of one rollout. The run decides how to sample, not the agent.

    Every request has a connection of its own: to open one takes less time than to find a free one among those of all rollouts.
    """

    settings: HostSettings
    environ: Mapping[str, str]
    sampling: SamplingArguments
    base_url: str
    seed: int | None

    async def complete(self, request: ModelRequest, number: int, known: Sequence[int]) -> dict[str, Any]:
        """Return the JSON of a chat completion; see `session.Complete`. The lower of both token limits applies.

        Raises:
            RolloutFailed: the server cannot be reached, or refused.
        """
        settings = self.settings
        seed = None if self.seed is None else later_seed(self.seed, "turn", number)
        arguments = request_arguments(self.sampling, seed=seed)
        body: dict[str, Any] = {"model": settings.model_name, "messages": request.messages, **arguments.pop("extra_body")}
        body |= {name: value for name, value in arguments.items() if value is not None}
        body |= {name: value for name, value in (("tools", request.tools), ("stop", request.stop)) if value}
        if limits := [limit for limit in (body.get("max_tokens"), request.max_tokens) if limit is not None]:
            body["max_tokens"] = min(limits)
        if known and settings.trajectory_strategy == "interleaved":
            body["known_token_ids"] = list(known)
        key = settings.servers.api_key(self.base_url, self.environ)
        headers = {**settings.servers.headers, **({"Authorization": f"Bearer {key}"} if key else {})}
        url, is_near = f"{server_root(self.base_url)}/v1/chat/completions", is_direct(self.base_url, self.environ)
        try:
            async with httpx.AsyncClient(timeout=settings.servers.timeout_s, trust_env=not is_near, verify=_tls()) as http:
                answer = await http.post(url, json=body, headers=headers)
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


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the certificates that are trusted. To load them takes longer than to open a connection."""
    return httpx.create_ssl_context()
