"""The verifiers client that asks our inference server, and keeps what verifiers would drop: the policy of each token, and the
very tokens of earlier turns, which it sends along so that the server need not make them again from text."""

from collections.abc import Mapping, Sequence
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI, BadRequestError

from trivet.algorithms.seeds import derive_seed
from trivet.wire.versions import PolicyVersion, VersionRun


class ModelClient(vf.OpenAIChatCompletionsClient):
    """Chat completions on one server; each answer carries `policy_versions` of its sampled tokens."""

    def __init__(self, client: AsyncOpenAI, *, keeps_tokens: bool = False) -> None:
        """
        Args:
            keeps_tokens: a turn begins with the tokens of the turn that it continues, where the chat template allows it.
        """
        super().__init__(client)
        self._keeps_tokens = keeps_tokens

    async def get_response(
        self, prompt: vf.Messages, model: str, sampling_args: vf.SamplingArgs, tools: list[vf.Tool] | None = None, **kwargs: Any
    ) -> vf.Response:
        state = kwargs.get("state")
        trajectory = state["trajectory"] if state is not None else []
        sampling_args = dict(sampling_args)
        if trajectory and sampling_args.get("seed") is not None:
            # With one seed for all turns, each would draw the same luck again.
            sampling_args["seed"] = derive_seed(sampling_args["seed"], "turn", len(trajectory)) % 2**31
        if self._keeps_tokens and (known := known_tokens(prompt, trajectory)):
            sampling_args["extra_body"] = {**sampling_args.get("extra_body", {}), "known_token_ids": known}
        return await super().get_response(prompt, model, sampling_args, tools, **kwargs)

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().get_native_response(*args, **kwargs)
        except BadRequestError as exc:
            # vLLM's words for a prompt that leaves no room at all; verifiers knows its words for a longer one.
            if "max_tokens must be at least 1" in exc.response.text:
                raise vf.OverlongPromptError from exc
            raise

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


def known_tokens(prompt: vf.Messages, trajectory: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Ids of the last turn that `prompt` goes on from, as read and sampled; None when it goes on from none.

    Args:
        trajectory: steps of verifiers, in order.
    """
    for step in reversed(trajectory):
        tokens = step["response"].message.tokens
        messages = [*step["prompt"], *step["completion"]]
        if tokens is not None and prompt[: len(messages)] == messages:
            return [*tokens.prompt_ids, *tokens.completion_ids]
    return None


def make_model_client(
    base_url: str,
    *,
    api_key: str | None,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    keeps_tokens: bool = False,
) -> ModelClient:
    """
    Args:
        base_url: of the server, with `/v1` at its end or without.
        headers: sent with every request.
        keeps_tokens: see `ModelClient`; for servers of ours.
    """
    root = base_url.rstrip("/").removesuffix("/v1")
    openai = AsyncOpenAI(
        base_url=f"{root}/v1", api_key=api_key or "EMPTY", timeout=timeout_s, default_headers=headers, max_retries=0
    )
    return ModelClient(openai, keeps_tokens=keeps_tokens)


def response_versions(response: vf.Response) -> list[VersionRun] | None:
    """Versions of the sampled tokens, None when the server does not report them."""
    runs = response.get("policy_versions")
    if runs is None:
        return None
    return [VersionRun(PolicyVersion(version), length) for version, length in runs]
