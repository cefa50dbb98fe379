"""Reads the requests that agents' clients send, and writes answers in their form: OpenAI chat and responses, Anthropic messages.

Every request becomes a `ModelRequest` with messages in the OpenAI chat format, and every answer is made of one assistant message
in that format. A stream is written from the whole answer. What would constrain the answer is refused: the trainer computes
probabilities over the whole vocabulary. Pure.

Sources: the API references of OpenAI (chat completions, responses) and Anthropic (messages), as of openai 3 and anthropic 2, and
the requests of Claude Code 2.1 and Codex 0.171.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

Json = dict[str, Any]
_TEXT_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of the function that stands for a tool which takes plain text."""


class ModelRequest(msgspec.Struct, kw_only=True):
    """A request of an agent to the model."""

    messages: list[Json]
    """The conversation in the OpenAI chat format."""
    tools: list[Json] = []
    """The functions that the model may call, in the OpenAI chat format."""
    call_fields: dict[str, Json] = {}
    """For a tool that the client offers in another form than as a function: the fields by which its calls differ from those of a
    function, by the name of the function that stands for it."""
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
    call_fields: dict[str, Json] = {}
    """Those of the request."""

    @property
    def text(self) -> str:
        """The text of the message."""
        return str(self.message.get("content") or "")

    @property
    def calls(self) -> list[Json]:
        """The calls of functions in the message."""
        return list(self.message.get("tool_calls") or [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One API of model providers."""

    path: str
    """The path below `/v1` to which clients post requests."""
    read_messages: Callable[[Mapping[str, Any]], list[Json]]
    """Returns the conversation in the body of a request. Raises ValueError for what cannot be trained on."""
    write: Callable[[ModelReply], Json]
    """Returns the body of an answer."""
    events: Callable[[Mapping[str, Any]], Iterator[str]]
    """Yields an answer as server-sent events."""

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Return the request in a body. Raises ValueError for what cannot be trained on."""
        if body.get("n") not in (None, 1):
            raise ValueError(f"n must be 1, got {body['n']}: send several requests")
        text, output = body.get("text") or {}, body.get("output_config") or {}
        for form in filter(None, (body.get("response_format"), text.get("format"), output.get("format"))):
            if form["type"] != "text":
                raise ValueError(
                    f"format {form['type']!r} constrains the answer, which cannot be trained on; ask for plain text"
                )
        choice = body.get("tool_choice")
        chosen = choice["type"] if isinstance(choice, Mapping) else choice
        if chosen not in (None, "auto", "none"):
            raise ValueError(f"tool_choice {chosen!r} forces a call, which cannot be trained on; leave the choice to the model")
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("max_output_tokens")
        if not isinstance(max_tokens, int | None):
            raise ValueError(f"the limit of tokens must be a number of tokens, got {max_tokens!r}")
        stop = body.get("stop") or body.get("stop_sequences") or []
        request = ModelRequest(
            messages=self.read_messages(body),
            max_tokens=max_tokens,
            stop=[stop] if isinstance(stop, str) else stop,
            is_streamed=bool(body.get("stream")),
        )
        if chosen != "none":
            _add_tools(request, body.get("tools") or [])
        return request


def _read_chat(body: Mapping[str, Any]) -> list[Json]:
    return [{**message, "role": _role(message)} for message in body["messages"]]


def _write_chat(reply: ModelReply) -> Json:
    return {
        "id": reply.id,
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [{"index": 0, "message": reply.message, "finish_reason": reply.finish_reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def _stream_chat(answer: Mapping[str, Any]) -> Iterator[str]:
    choice = answer["choices"][0]
    calls = [{**call, "index": index} for index, call in enumerate(choice["message"].get("tool_calls") or [])]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    common = {**answer, "object": "chat.completion.chunk", "usage": None}
    yield _event({**common, "choices": [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]})
    yield _event({**common, "choices": [], "usage": answer["usage"]})
    yield "data: [DONE]\n\n"


def _read_responses(body: Mapping[str, Any]) -> list[Json]:
    if body.get("previous_response_id") or body.get("conversation"):
        raise ValueError("previous_response_id and conversation are not kept here: send the whole conversation as input")
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body["input"]
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        _add_item(messages, item)
    return messages


def _write_responses(reply: ModelReply) -> Json:
    output: list[Json] = []
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "content": [part]}
        output.append({**message, "status": "completed"})
    output += [_call_item(call, reply.call_fields.get(call["function"]["name"], {})) for call in reply.calls]
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


def _stream_responses(answer: Mapping[str, Any]) -> Iterator[str]:
    listed: list[tuple[str, Json]] = [("created", {"response": {**answer, "status": "in_progress", "output": []}})]
    for index, item in enumerate(answer["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        match item["type"]:
            case "message":
                part, place = item["content"][0], {**place, "content_index": 0}
                begun: Json = {"content": []}
                inner: list[tuple[str, Json]] = [
                    ("content_part.added", {"part": {**part, "text": ""}}),
                    ("output_text.delta", {"delta": part["text"], "logprobs": []}),
                    ("output_text.done", {"text": part["text"], "logprobs": []}),
                    ("content_part.done", {"part": part}),
                ]
            case kind:
                key, name = ("arguments", "function_call_arguments") if kind == "function_call" else ("input", f"{kind}_input")
                begun = {key: ""}
                done = {key: item[key], "name": item["name"]}
                inner = [(f"{name}.delta", {"delta": item[key]}), (f"{name}.done", done)]
        listed.append(("output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", **begun}}))
        listed += [(name, {**place, **fields}) for name, fields in inner]
        listed.append(("output_item.done", {"output_index": index, "item": item}))
    listed.append((answer["status"], {"response": dict(answer)}))
    for number, (name, fields) in enumerate(listed):
        yield _event({"type": f"response.{name}", **fields, "sequence_number": number})


def _read_messages(body: Mapping[str, Any]) -> list[Json]:
    system = _text_of(body.get("system"))
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    for message in body["messages"]:
        messages += _from_blocks(message)
    return messages


def _write_messages(reply: ModelReply) -> Json:
    content: list[Json] = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    for call in reply.calls:
        name, arguments = call["function"]["name"], _arguments(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
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


def _stream_messages(answer: Mapping[str, Any]) -> Iterator[str]:
    yield _event({"type": "message_start", "message": {**answer, "content": [], "stop_reason": None}})
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            begun, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            begun, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event({"type": "content_block_start", "index": index, "content_block": {**block, **begun}})
        yield _event({"type": "content_block_delta", "index": index, "delta": delta})
        yield _event({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    yield _event({"type": "message_delta", "delta": ended, "usage": answer["usage"]})
    yield _event({"type": "message_stop"})


def _event(data: Mapping[str, Any]) -> str:
    first = f"event: {data['type']}\n" if "type" in data else ""
    return f"{first}data: {json.dumps(data)}\n\n"


def _add_tools(request: ModelRequest, tools: Iterable[Mapping[str, Any]], *, namespace: str = "") -> None:
    """Add the tools of a request of any API as functions.

    Raises:
        ValueError: a tool cannot be stated as a function: the provider runs it, or only the provider's models know it.
    """
    for tool in tools:
        match tool:
            case {"type": "function", "function": Mapping()}:
                request.tools.append(dict(tool))
                continue
            case {"type": "namespace", "name": name, "tools": inner} if not namespace:
                _add_tools(request, inner, namespace=name)
                continue
            case {"type": "function", "parameters": parameters} | {"input_schema": parameters}:
                fields = {"name": tool["name"], "namespace": namespace} if namespace else {}
            case {"type": "custom", "name": str()}:
                parameters, fields = _TEXT_INPUT, {"type": "custom_tool_call"}
            case _:
                raise ValueError(
                    f"a tool of type {tool.get('type')!r} cannot be offered to the model; switch it off in the client"
                )
        name = _function_name(tool["name"], namespace)
        description = "\n".join(filter(None, [tool.get("description"), (tool.get("format") or {}).get("definition")]))
        function = {"name": name, **({"description": description} if description else {}), "parameters": parameters}
        request.tools.append({"type": "function", "function": function})
        if fields:
            request.call_fields[name] = fields


def _function_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def _role(message: Mapping[str, Any]) -> str:
    """Return a role that chat templates know."""
    return "system" if message["role"] == "developer" else message["role"]


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


def _call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_item(call: Mapping[str, Any], fields: Mapping[str, Any]) -> Json:
    """Return a call as an item of the Responses API."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    item = {
        "type": "function_call",
        "id": f"fc_{call['id']}",
        "call_id": call["id"],
        "name": name,
        "status": "completed",
        **fields,
    }
    if item["type"] == "function_call":
        return {**item, "arguments": arguments}
    return {**item, "input": _arguments(arguments).get("input", arguments)}


def _add_item(messages: list[Json], item: Mapping[str, Any]) -> None:
    """Add an item of the Responses API to a conversation. Calls that follow a reply of the assistant belong to its message."""
    match item.get("type", "message"):
        case "function_call" | "custom_tool_call" as kind:
            arguments = item["arguments"] if kind == "function_call" else json.dumps({"input": item["input"]})
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            name = _function_name(item["name"], item.get("namespace"))
            messages[-1].setdefault("tool_calls", []).append(_call(item["call_id"], name, arguments))
        case "function_call_output" | "custom_tool_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text_of(item["output"])})
        case "message":
            messages.append({"role": _role(item), "content": _text_of(item["content"])})
        case "reasoning":
            pass
        case other:
            raise ValueError(f"an input item of type {other!r} cannot be trained on")


def _from_blocks(message: Mapping[str, Any]) -> Iterator[Json]:
    """Yield an Anthropic message in the chat format, where each result of a tool is a message of its own."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts, calls = list[Json](), list[Json]()
    for block in blocks:
        match block["type"]:
            case "tool_result":
                yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _text_of(block.get("content"))}
            case "tool_use":
                calls.append(_call(block["id"], block["name"], json.dumps(block["input"])))
            case "thinking" | "redacted_thinking":
                pass
            case _:
                texts.append(block)
    if texts or calls:
        text = _text_of(texts)
        yield {"role": message["role"], "content": text or (None if calls else ""), **({"tool_calls": calls} if calls else {})}


CHAT = Format(path="/chat/completions", read_messages=_read_chat, write=_write_chat, events=_stream_chat)
"""OpenAI chat completions."""
RESPONSES = Format(path="/responses", read_messages=_read_responses, write=_write_responses, events=_stream_responses)
"""OpenAI responses, without state: each request carries the whole conversation."""
MESSAGES = Format(path="/messages", read_messages=_read_messages, write=_write_messages, events=_stream_messages)
"""Anthropic messages."""
FORMATS = (CHAT, RESPONSES, MESSAGES)
