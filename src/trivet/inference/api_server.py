"""Extends vLLM's API server: answers have policy versions, chats continue earlier tokens, adapters have names.

`policy_versions` is a field of each choice of an answer: one [version, length] per run of sampled tokens, in order. Complete
answers of completions, of chats or texts, and of token-in, token-out have it; streamed answers and answers of beam search do not.

A chat completion may carry `known_token_ids`: prompt and completion of the turn that it continues, as the answer of that turn
reported them. If the chat template's text begins with their text, the engine reads exactly these ids and then the tokens of the new
text. Otherwise the request is answered as if it did not carry them. `prompt_token_ids` of the answer are the ids that were read.
Tools, reasoning and limits stay vLLM's own. For this the field `kv_transfer_params` is used, by which vLLM's renderer accepts ready
token ids: vLLM has it for a request that one server hands to another.
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
    CompletionResponse,
    ErrorResponse,
    GenerateTextChoice,
    GenerateTextResponse,
    GenerateTokensChoice,
    GenerateTokensResponse,
    LoadLoRAAdapterRequest,
    OnlineRenderer,
    OpenAIServingChat,
    OpenAIServingCompletion,
    OpenAIServingModels,
    ServingTokens,
    TokensPrompt,
    merge_kwargs,
)

KNOWN_TOKEN_IDS = "known_token_ids"

ServeRequest = Callable[..., Awaitable[Any]]
"""A method of vLLM's server that answers a request."""

_TOKEN_IDS = TypeAdapter(Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)])
"""Validates `known_token_ids`."""


def add_versions(serving: OpenAIServingChat | OpenAIServingCompletion | ServingTokens, method: str) -> None:
    """Wrap the method of `serving` that answers requests, so that choices of complete answers have policy versions.

    vLLM allows further fields in the choices of completions. This function allows them for token-in, token-out too.
    """
    for choice, response in ((GenerateTokensChoice, GenerateTokensResponse), (GenerateTextChoice, GenerateTextResponse)):
        choice.model_config["extra"] = "allow"
        choice.model_rebuild(force=True)
        response.model_rebuild(force=True)
    serve: ServeRequest = getattr(serving, method)

    async def serve_with_versions(*args: Any, **kwargs: Any) -> Any:
        with collect_versions() as collected:
            answer: Any = await serve(*args, **kwargs)
        complete_types = (ChatCompletionResponse, CompletionResponse, GenerateTokensResponse, GenerateTextResponse)
        # Beam search makes several engine requests of one HTTP request, whose tokens no choice can be matched with.
        if len(collected) == 1 and isinstance(answer, complete_types):
            for choice in answer.choices:
                runs = collected[0].runs.get(choice.index, [])
                length = sum(run.length for run in runs)
                assert choice.token_ids is None or length == len(choice.token_ids), f"{length} versions of {choice.token_ids}"
                choice.policy_versions = [(int(run.version), run.length) for run in runs]  # type: ignore[attr-defined]  extra fields
        return answer

    setattr(serving, method, serve_with_versions)


def continue_chats(serving: OpenAIServingChat) -> None:
    """Wrap `serving` so that its requests may carry `known_token_ids`."""
    serve: ServeRequest = serving.create_chat_completion

    async def create_chat_completion(request: ChatCompletionRequest, *args: Any, **kwargs: Any) -> Any:
        value = (request.model_extra or {}).get(KNOWN_TOKEN_IDS)
        if value is not None:
            try:
                known_ids = _TOKEN_IDS.validate_python(value, strict=True)
            except ValidationError as exc:
                problem = exc.errors()[0]
                return serving.create_error_response(
                    f"{KNOWN_TOKEN_IDS} must be a list of token ids with at least one: {problem['msg']}",
                    status_code=HTTPStatus.BAD_REQUEST,
                    param=KNOWN_TOKEN_IDS,
                )
            prompt_ids = await _make_prompt(serving.online_renderer, request, known_ids)
            if prompt_ids is not None:
                request.kv_transfer_params = {**(request.kv_transfer_params or {}), "prompt_token_ids": prompt_ids}
        return await serve(request, *args, **kwargs)

    serving.create_chat_completion = create_chat_completion


async def _make_prompt(renderer: OnlineRenderer, request: ChatCompletionRequest, known_ids: list[int]) -> list[int] | None:
    """Return the token ids of a prompt that begins with `known_ids`; None when the conversation cannot begin with them."""
    params = _make_chat_params(renderer, request)
    if params is None:
        return None
    _, rendered = await renderer.renderer.render_messages_async(request.messages, params)
    text = rendered.get("prompt")
    if not isinstance(text, str) or "multi_modal_data" in rendered:
        return None
    tokenizer = renderer.renderer.get_tokenizer()
    prompt_ids = await asyncio.to_thread(continue_tokens, known_ids, text=text, tokenizer=tokenizer)
    if prompt_ids is None:
        return None
    limits = request.build_tok_params(renderer.model_config)
    return limits.apply_post_tokenization(tokenizer, TokensPrompt(prompt_token_ids=prompt_ids)).get("prompt_token_ids")


def _make_chat_params(renderer: OnlineRenderer, request: ChatCompletionRequest) -> ChatParams | None:
    """Return the parameters with which vLLM itself would render the conversation to text.

    None means that vLLM refuses the request's chat template, or that the model's conversations are not rendered to text.
    """
    refusal = renderer.validate_chat_template(
        request_chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
        trust_request_chat_template=renderer.trust_request_chat_template,
    )
    if refusal is not None or renderer.use_harmony:
        return None
    hides_tools = request.tool_choice == "none" and renderer.exclude_tools_when_tool_choice_none
    tools = None if request.tools is None or hides_tools else [tool.model_dump() for tool in request.tools]
    defaults = merge_kwargs(renderer.default_chat_template_kwargs, {"tools": tools, "tokenize": False})
    return request.build_chat_params(renderer.chat_template, renderer.chat_template_content_format).with_defaults(defaults)


class NamedAdapters:
    """Serves users' adapters by name. A request that gives an adapter's name as its `model` is answered by that adapter."""

    def __init__(self, models: OpenAIServingModels, *, roots: Sequence[Path]) -> None:
        self._models = models
        self._roots = roots

    async def load(self, name: str, *, path: Path) -> None:
        """Serve the adapter in the directory `path` as `name`.

        Raises:
            WeightsError: the adapter cannot be served; an adapter that was loaded under `name` before stays.
        """
        require_below(self._roots, path)
        answer = await self._models.load_lora_adapter(
            LoadLoRAAdapterRequest(lora_name=name, lora_path=str(path), load_inplace=True)
        )
        if isinstance(answer, ErrorResponse):
            raise WeightsError(f"{path} cannot be served as {name!r}: {answer.error.message}")
