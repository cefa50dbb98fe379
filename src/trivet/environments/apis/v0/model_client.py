"""Asks an inference server for completions, as a client of verifiers 0.3.

The client keeps what verifiers would drop: the policy version of each sampled token, and the token ids of earlier turns. It sends
these ids with the next turn, so that the server need not tokenize the text again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI, BadRequestError

from trivet.environments.apis.requests import turn_seed


class ModelClient(vf.OpenAIChatCompletionsClient):
    """The verifiers client of one server. Each response carries the `policy_versions` of its sampled tokens."""

    def __init__(self, client: AsyncOpenAI, *, keeps_tokens: bool = False) -> None:
        """Ask through `client`.

        Args:
            keeps_tokens: a turn begins with the tokens of the turn that it continues, where the chat template allows it.
        """
        super().__init__(client)
        self._keeps_tokens = keeps_tokens

    async def get_response(
        self, prompt: vf.Messages, model: str, sampling_args: vf.SamplingArgs, tools: list[vf.Tool] | None = None, **kwargs: Any
    ) -> vf.Response:
        """Complete `prompt`, with a seed and the known tokens of this turn."""
        state = kwargs.get("state")
        trajectory = state["trajectory"] if state is not None else []
        sampling_args = dict(sampling_args)
        if sampling_args.get("seed") is not None:
            sampling_args["seed"] = turn_seed(sampling_args["seed"], len(trajectory))
        if self._keeps_tokens and (known := known_tokens(prompt, trajectory)):
            sampling_args["extra_body"] = {**sampling_args.get("extra_body", {}), "known_token_ids": known}
        return await super().get_response(prompt, model, sampling_args, tools, **kwargs)

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        """Translate a prompt that fills the whole context into OverlongPromptError."""
        try:
            return await super().get_native_response(*args, **kwargs)
        except BadRequestError as exc:
            # vLLM says this of a prompt as long as the context; what it says of a longer one verifiers recognizes itself.
            if "max_tokens must be at least 1" in exc.response.text:
                raise vf.OverlongPromptError from exc
            raise

    async def raise_from_native_response(self, response: Any) -> None:
        """Accept an empty completion: the policy chose to stop at once, which is a sample like any other."""
        if response.choices and response.choices[0].finish_reason is not None:
            return
        await super().raise_from_native_response(response)

    async def from_native_response(self, response: Any) -> vf.Response:
        """Add the policy versions of the sampled tokens to verifiers' response."""
        converted = await super().from_native_response(response)
        extra = response.choices[0].model_extra or {}
        converted.policy_versions = extra.get("policy_versions")  # type: ignore[attr-defined]  extra fields are allowed
        return converted


def known_tokens(prompt: vf.Messages, trajectory: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Return the token ids of the last turn that `prompt` continues, as read and sampled; None when it continues none.

    Args:
        trajectory: steps of verifiers, in order.
    """
    for step in reversed(trajectory):
        tokens = step["response"].message.tokens
        messages = [*step["prompt"], *step["completion"]]
        if tokens is not None and prompt[: len(messages)] == messages:
            return [*tokens.prompt_ids, *tokens.completion_ids]
    return None
