"""Reads the requests that agents' clients send, and writes answers in their form: OpenAI chat and responses, Anthropic messages.

Every request becomes a `ModelRequest` with messages in the OpenAI chat format, and every answer is made of one assistant message
in that format. A stream is written from the whole answer. Pure.

Sources: the API references of OpenAI (chat completions, responses) and Anthropic (messages), as of openai 2 and anthropic 1.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

Json = dict[str, Any]
_ROLES = {"developer": "system"}
"""Roles that chat templates do not know, and the role that they stand for."""


class ModelRequest(msgspec.Struct, kw_only=True):
    """A request of an agent to the model."""

    messages: list[Json]
    """The conversation in the OpenAI chat format."""
    tools: list[Json] = []
    """The functions that the model may call, in the OpenAI chat format."""
    max_tokens: int | None = None
    stop: list[str] = []
    is_streamed: bool = False


class ModelReply(msgspec.Struct, frozen=True, kw_only=True):
    """The model's answer to one request."""

    id: str
    model: str
    message: Json
    """The assistant's message in the OpenAI chat format."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    completion_tokens: int
    created: int

    @property
    def text(self) -> str:
        """The text of the message."""
        return str(self.message.get("content") or "")

    @property
    def calls(self) -> list[Json]:
        """The calls of functions in the message."""
        return list(self.message.get("tool_calls") or [])


class Format(Protocol):
    """One API of model providers."""

    path: str
    """The path below `/v1` to which clients post requests."""

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Return the request in a body. Raises ValueError for what cannot be trained on."""
        ...

    def write(self, reply: ModelReply) -> Json:
        """Return the body of an answer."""
        ...

    def events(self, answer: Mapping[str, Any]) -> Iterator[str]:
        """Yield an answer as server-sent events."""
        ...

    def error(self, message: str, *, kind: str) -> Json:
        """Return the body of an error."""
        ...


class ChatFormat:
    """OpenAI chat completions."""

    path = "/chat/completions"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """See `Format.read`."""
        if body.get("n") not in (None, 1):
            raise ValueError(f"n must be 1, got {body['n']}: send several requests")
        _refuse_constraints(body.get("response_format"), "response_format")
        return ModelRequest(
            messages=[{**message, "role": _ROLES.get(message["role"], message["role"])} for message in body["messages"]],
            tools=_chosen(list(body.get("tools") or []), body.get("tool_choice")),
            max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
            stop=_as_list(body.get("stop")),
            is_streamed=bool(body.get("stream")),
        )

    def write(self, reply: ModelReply) -> Json:
        """See `Format.write`."""
        usage = {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        }
        choice = {"index": 0, "message": reply.message, "finish_reason": reply.finish_reason, "logprobs": None}
        return {
            "id": reply.id,
            "object": "chat.completion",
            "created": reply.created,
            "model": reply.model,
            "choices": [choice],
            "usage": usage,
        }

    def events(self, answer: Mapping[str, Any]) -> Iterator[str]:
        """See `Format.events`."""
        choice = answer["choices"][0]
        calls = [{**call, "index": index} for index, call in enumerate(choice["message"].get("tool_calls") or [])]
        delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
        common = {**answer, "object": "chat.completion.chunk", "usage": None}
        yield _event({**common, "choices": [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]})
        yield _event({**common, "choices": [], "usage": answer["usage"]})
        yield "data: [DONE]\n\n"

    def error(self, message: str, *, kind: str) -> Json:
        """See `Format.error`."""
        return {"error": {"message": message, "type": kind, "param": None, "code": kind}}


class ResponsesFormat:
    """OpenAI responses, without state: each request carries the whole conversation."""

    path = "/responses"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """See `Format.read`."""
        if body.get("previous_response_id") or body.get("conversation"):
            raise ValueError("previous_response_id and conversation are not kept here: send the whole conversation as input")
        _refuse_constraints((body.get("text") or {}).get("format"), "text.format")
        messages: list[Json] = []
        if body.get("instructions"):
            messages.append({"role": "system", "content": body["instructions"]})
        given = body["input"]
        for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
            _add_item(messages, item)
        tools = [
            {
                "type": "function",
                "function": {name: tool[name] for name in ("name", "description", "parameters") if name in tool},
            }
            for tool in body.get("tools") or []
            if tool.get("type") == "function"
        ]
        return ModelRequest(
            messages=messages,
            tools=_chosen(tools, body.get("tool_choice")),
            max_tokens=body.get("max_output_tokens"),
            is_streamed=bool(body.get("stream")),
        )

    def write(self, reply: ModelReply) -> Json:
        """See `Format.write`."""
        output: list[Json] = []
        if reply.text or not reply.calls:
            part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
            output.append(
                {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": "completed", "content": [part]}
            )
        for call in reply.calls:
            output.append(
                {
                    "type": "function_call",
                    "id": f"fc_{call['id']}",
                    "call_id": call["id"],
                    "name": call["function"]["name"],
                    "arguments": call["function"]["arguments"],
                    "status": "completed",
                }
            )
        is_cut = reply.finish_reason == "length"
        return {
            "id": f"resp_{reply.id}",
            "object": "response",
            "created_at": reply.created,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "model": reply.model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "metadata": {},
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": reply.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            },
        }

    def events(self, answer: Mapping[str, Any]) -> Iterator[str]:
        """See `Format.events`."""
        listed: list[Json] = [{"type": "response.created", "response": {**answer, "status": "in_progress", "output": []}}]
        for index, item in enumerate(answer["output"]):
            place = {"output_index": index, "item_id": item["id"]}
            is_call = item["type"] == "function_call"
            begun = {**item, "status": "in_progress", **({"arguments": ""} if is_call else {"content": []})}
            listed.append({"type": "response.output_item.added", "output_index": index, "item": begun})
            if is_call:
                arguments = {"name": item["name"], "arguments": item["arguments"]}
                listed.append({"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]})
                listed.append({"type": "response.function_call_arguments.done", **place, **arguments})
            else:
                part = item["content"][0]
                within = {**place, "content_index": 0}
                listed.append({"type": "response.content_part.added", **within, "part": {**part, "text": ""}})
                listed.append({"type": "response.output_text.delta", **within, "delta": part["text"], "logprobs": []})
                listed.append({"type": "response.output_text.done", **within, "text": part["text"], "logprobs": []})
                listed.append({"type": "response.content_part.done", **within, "part": part})
            listed.append({"type": "response.output_item.done", "output_index": index, "item": item})
        listed.append({"type": f"response.{answer['status']}", "response": dict(answer)})
        for number, event in enumerate(listed):
            yield _event({**event, "sequence_number": number}, name=event["type"])

    def error(self, message: str, *, kind: str) -> Json:
        """See `Format.error`."""
        return ChatFormat().error(message, kind=kind)


class MessagesFormat:
    """Anthropic messages."""

    path = "/messages"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """See `Format.read`."""
        messages: list[Json] = []
        if system := _text_of(body.get("system")):
            messages.append({"role": "system", "content": system})
        for message in body["messages"]:
            messages += _from_blocks(message)
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description", ""),
                    "parameters": tool["input_schema"],
                },
            }
            for tool in body.get("tools") or []
            if "input_schema" in tool
        ]
        return ModelRequest(
            messages=messages,
            tools=_chosen(tools, body.get("tool_choice")),
            max_tokens=body.get("max_tokens"),
            stop=_as_list(body.get("stop_sequences")),
            is_streamed=bool(body.get("stream")),
        )

    def write(self, reply: ModelReply) -> Json:
        """See `Format.write`."""
        content: list[Json] = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
        for call in reply.calls:
            function = call["function"]
            content.append(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _arguments(function["arguments"])}
            )
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        return {
            "id": f"msg_{reply.id}",
            "type": "message",
            "role": "assistant",
            "model": reply.model,
            "content": content,
            "stop_reason": reasons.get(reply.finish_reason, "end_turn"),
            "stop_sequence": None,
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
        }

    def events(self, answer: Mapping[str, Any]) -> Iterator[str]:
        """See `Format.events`."""
        begun = {**answer, "content": [], "stop_reason": None}
        listed: list[Json] = [{"type": "message_start", "message": begun}]
        for index, block in enumerate(answer["content"]):
            is_text = block["type"] == "text"
            empty = {**block, **({"text": ""} if is_text else {"input": {}})}
            delta = (
                {"type": "text_delta", "text": block["text"]}
                if is_text
                else {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            )
            listed.append({"type": "content_block_start", "index": index, "content_block": empty})
            listed.append({"type": "content_block_delta", "index": index, "delta": delta})
            listed.append({"type": "content_block_stop", "index": index})
        ended = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
        listed.append({"type": "message_delta", "delta": ended, "usage": {"output_tokens": answer["usage"]["output_tokens"]}})
        listed.append({"type": "message_stop"})
        for event in listed:
            yield _event(event, name=event["type"])

    def error(self, message: str, *, kind: str) -> Json:
        """See `Format.error`."""
        return {"type": "error", "error": {"type": kind, "message": message}}


FORMATS: tuple[Format, ...] = (ChatFormat(), ResponsesFormat(), MessagesFormat())


def _event(data: Mapping[str, Any], *, name: str | None = None) -> str:
    first = f"event: {name}\n" if name else ""
    return f"{first}data: {json.dumps(data)}\n\n"


def _as_list(value: str | Sequence[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _chosen(tools: list[Json], choice: str | Mapping[str, Any] | None) -> list[Json]:
    """Return the tools that the model may call; a forced call is refused, because it constrains the answer."""
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind == "none":
        return []
    if kind not in (None, "auto"):
        raise ValueError(f"tool_choice {kind!r} forces a call, which cannot be trained on; leave the choice to the model")
    return tools


def _refuse_constraints(value: Mapping[str, Any] | None, key: str) -> None:
    """Refuse a grammar for the answer: the trainer computes probabilities over the whole vocabulary."""
    if value and value.get("type", "text") != "text":
        raise ValueError(f"{key} {value.get('type')!r} constrains the answer, which cannot be trained on; ask for plain text")


def _text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return the text of a content that is a text or a list of parts. Raises ValueError for a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content:
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise ValueError(f"a part of type {part.get('type')!r} is no text, which is all that can be trained on")
        texts.append(part["text"])
    return "\n".join(texts)


def _arguments(text: str) -> Json:
    """Return the arguments of a call. What the model wrote may be no JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": value}


def _add_item(messages: list[Json], item: Mapping[str, Any]) -> None:
    """Add an item of the Responses API to a conversation. Calls that follow a reply of the assistant belong to its message."""
    match item.get("type", "message"):
        case "function_call":
            call = {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text_of(item["output"])})
        case "message":
            messages.append({"role": _ROLES.get(item["role"], item["role"]), "content": _text_of(item["content"])})
        case "reasoning":
            pass
        case other:
            raise ValueError(f"an input item of type {other!r} cannot be trained on")


def _from_blocks(message: Mapping[str, Any]) -> Iterator[Json]:
    """Yield an Anthropic message in the chat format, where each result of a tool is a message of its own."""
    if isinstance(message["content"], str):
        yield {"role": message["role"], "content": message["content"]}
        return
    blocks = message["content"]
    for block in blocks:
        if block["type"] == "tool_result":
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _text_of(block.get("content"))}
    texts = [block for block in blocks if block["type"] not in ("tool_result", "tool_use", "thinking", "redacted_thinking")]
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    if texts or calls:
        yield {"role": message["role"], "content": _text_of(texts) or None, **({"tool_calls": calls} if calls else {})}
