"""The verifiers client that asks our inference server, and keeps what verifiers would drop: the policy of each token."""

from typing import Any

import verifiers as vf
from openai import AsyncOpenAI

from trivet.config.orchestrator import SamplingConfig
from trivet.wire.versions import PolicyVersion, VersionRun


def request_arguments(sampling: SamplingConfig, *, seed: int | None) -> dict[str, Any]:
    """Sampling arguments of one chat-completions request to our server, in the form verifiers passes on.

    Args:
        seed: of this request alone.
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": seed,
        "logprobs": True,
        "extra_body": {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "min_tokens": sampling.min_tokens,
            **sampling.extra_body,
            "return_token_ids": True,
        },
    }


class ModelClient(vf.OpenAIChatCompletionsClient):
    """Chat completions on one server; each answer carries `policy_versions` of its sampled tokens."""

    async def raise_from_native_response(self, response: Any) -> None:
        """An empty completion is a sample like any other: the policy chose to stop at once."""
        if response.choices and response.choices[0].finish_reason is not None:
            return
        await super().raise_from_native_response(response)

    async def from_native_response(self, response: Any) -> vf.Response:
        answer = await super().from_native_response(response)
        extra = response.choices[0].model_extra or {}
        answer["policy_versions"] = extra.get("policy_versions")
        return answer


def make_model_client(base_url: str, *, api_key: str | None, timeout_s: float) -> ModelClient:
    """
    Args:
        base_url: of the server, with `/v1` at its end or without.
    """
    root = base_url.rstrip("/").removesuffix("/v1")
    openai = AsyncOpenAI(base_url=f"{root}/v1", api_key=api_key or "EMPTY", timeout=timeout_s, max_retries=0)
    return ModelClient(openai)


def response_versions(response: vf.Response) -> list[VersionRun] | None:
    """Versions of the sampled tokens, None when the server does not report them."""
    runs = response.get("policy_versions")
    if runs is None:
        return None
    return [VersionRun(PolicyVersion(version), length) for version, length in runs]
