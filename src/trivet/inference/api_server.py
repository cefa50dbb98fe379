"""Changes what vLLM's API server serves: answers have policy versions, chats continue earlier tokens, adapters have names.

`policy_versions` has one [version, length] per run of sampled tokens, in order. Complete answers of chat completions and of
token-in, token-out have it; streamed ones, and those of beam search, do not.

A chat completion may carry `known_token_ids`: prompt and completion of the turn that it continues, as its answer reported them. If
the chat template's text begins with their text, the engine reads exactly these ids and then the tokens of the new text. Otherwise
the request is answered as if it did not carry them. `prompt_token_ids` of the answer are the ids that were read. Tools, reasoning
and limits are vLLM's own: its renderer accepts ready token ids, for the case that one of two servers hands a request to the other.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from trivet.errors import WeightsError
from trivet.inference.continuation import continue_tokens
from trivet.inference.policy_loader import require_below
from trivet.inference.versioned_engine import collect_versions
from trivet.inference.vllm_names import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatParams,
    ErrorResponse,
    GenerateTextChoice,
    GenerateTextResponse,
    GenerateTokensChoice,
    GenerateTokensResponse,
    LoadLoRAAdapterRequest,
    OnlineRenderer,
    OpenAIServingChat,
    OpenAIServingModels,
    ServingTokens,
    TokensPrompt,
    merge_kwargs,
)

KNOWN_TOKEN_IDS = "known_token_ids"

ServeRequest = Callable[..., Awaitable[Any]]

_token_ids = TypeAdapter(Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)])


def add_versions(serving: OpenAIServingChat | ServingTokens, method: str) -> None:
    """Wrap the method of `serving` that answers requests: choices of complete answers carry policy versions.

    Those of chat completions may have further fields. So may those of token-in, token-out from here on.
    """
    for choice, response in ((GenerateTokensChoice, GenerateTokensResponse), (GenerateTextChoice, GenerateTextResponse)):
        choice.model_config["extra"] = "allow"
        choice.model_rebuild(force=True)
        response.model_rebuild(force=True)
    serve: ServeRequest = getattr(serving, method)

    async def serve_with_versions(*args: Any, **kwargs: Any) -> Any:
        with collect_versions() as collected:
            answer: Any = await serve(*args, **kwargs)
        complete = (ChatCompletionResponse, GenerateTokensResponse, GenerateTextResponse)
        if len(collected) == 1 and isinstance(answer, complete):
            for choice in answer.choices:
                runs = collected[0].runs.get(choice.index, [])
                counted = sum(run.length for run in runs)
                assert choice.token_ids is None or counted == len(choice.token_ids), f"{counted} versions of {choice.token_ids}"
                choice.policy_versions = [(int(run.version), run.length) for run in runs]  # type: ignore[attr-defined]  extra fields
        return answer

    setattr(serving, method, serve_with_versions)


def continue_chats(serving: OpenAIServingChat) -> None:
    """Wrap `serving` so that its requests may carry `known_token_ids`."""
    serve: ServeRequest = serving.create_chat_completion

    async def create_chat_completion(request: ChatCompletionRequest, *args: Any, **kwargs: Any) -> Any:
        known = (request.model_extra or {}).get(KNOWN_TOKEN_IDS)
        if known is not None:
            try:
                known = _token_ids.validate_python(known, strict=True)
            except ValidationError as exc:
                problem = exc.errors()[0]
                return serving.create_error_response(
                    f"{KNOWN_TOKEN_IDS} must be a list of token ids with at least one: {problem['msg']}",
                    status_code=HTTPStatus.BAD_REQUEST,
                    param=KNOWN_TOKEN_IDS,
                )
            prompt = await _continued_prompt(serving.online_renderer, request, known)
            if prompt is not None:
                request.kv_transfer_params = {**(request.kv_transfer_params or {}), "prompt_token_ids": prompt}
        return await serve(request, *args, **kwargs)

    serving.create_chat_completion = create_chat_completion


async def _continued_prompt(online: OnlineRenderer, request: ChatCompletionRequest, known: list[int]) -> list[int] | None:
    """Return the token ids of the prompt; None when it cannot begin with the `known` ones."""
    params = _chat_params(online, request)
    if params is None:
        return None
    _, rendered = await online.renderer.render_messages_async(request.messages, params)
    text = rendered.get("prompt")
    if not isinstance(text, str) or "multi_modal_data" in rendered:
        return None
    tokenizer = online.renderer.get_tokenizer()
    prompt = await asyncio.to_thread(continue_tokens, known, text=text, tokenizer=tokenizer)
    if prompt is None:
        return None
    limits = request.build_tok_params(online.model_config)
    return limits.apply_post_tokenization(tokenizer, TokensPrompt(prompt_token_ids=prompt)).get("prompt_token_ids")


def _chat_params(online: OnlineRenderer, request: ChatCompletionRequest) -> ChatParams | None:
    """Return the parameters vLLM itself would render the conversation with; None when it refuses to, or does not render text."""
    refusal = online.validate_chat_template(
        request_chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
        trust_request_chat_template=online.trust_request_chat_template,
    )
    if refusal is not None or online.use_harmony:
        return None
    hides_tools = request.tool_choice == "none" and online.exclude_tools_when_tool_choice_none
    tools = None if request.tools is None or hides_tools else [tool.model_dump() for tool in request.tools]
    defaults = merge_kwargs(online.default_chat_template_kwargs, {"tools": tools, "tokenize": False})
    return request.build_chat_params(online.chat_template, online.chat_template_content_format).with_defaults(defaults)


class NamedAdapters:
    """Serves adapters under names of their own: a request that gives such a name as its `model` is answered by that adapter."""

    def __init__(self, models: OpenAIServingModels, *, roots: Sequence[Path]) -> None:
        self._models = models
        self._roots = roots

    async def load(self, name: str, *, path: Path) -> None:
        """Serve the adapter in the directory `path` as `name`.

        Raises:
            WeightsError: it cannot be served; an adapter that was loaded under `name` before stays.
        """
        require_below(self._roots, path)
        answer = await self._models.load_lora_adapter(
            LoadLoRAAdapterRequest(lora_name=name, lora_path=str(path), load_inplace=True)
        )
        if isinstance(answer, ErrorResponse):
            raise WeightsError(f"{path} cannot be served as {name!r}: {answer.error.message}")
