"""Turns conversations into samples: rendered by the chat template, tokenized, masked by role. Called by `trainer.sft.batches`.

The loss falls on the messages that `loss_mask` selects. Of an assistant's message the tokens of the answer and its end of turn are
trained on. The header of its turn is never trained on, because the model never samples it. Of another message all text that the
template makes of it is trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trivet.config.schema.sft import LossMaskConfig
from trivet.conversations.records import ChatMessage, Conversation
from trivet.errors import ConfigError
from trivet.wire.rollouts import Sample

TextSpan = tuple[int, int]
"""The first character of a span of text, and the first character after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A text that is tokenized by itself, a prompt or an answer: a server tokenizes the prompt without the answer."""

    text: str
    trained: Sequence[TextSpan]
    """The spans of the text that are trained on."""


def to_sample(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, *, loss_mask: LossMaskConfig | None = None
) -> Sample:
    """Make the token ids and loss mask of a conversation, up to the last message that is an answer or trained on.

    It refuses a template that renders a message differently once another follows, because no token sequence then fits all answers.

    Args:
        loss_mask: the roles whose messages are trained on; None: the assistant's.
    """
    token_ids: list[int] = []
    mask: list[bool] = []
    for piece in _pieces(conversation, tokenizer, loss_mask or LossMaskConfig()):
        ids, is_trained = _tokenize(piece, tokenizer)
        token_ids += ids
        mask += is_trained
    if mask:
        mask[0] = False
    return Sample(
        token_ids_T=np.array(token_ids, dtype=np.int32),
        loss_mask_T=np.array(mask, dtype=np.bool_),
        logprobs_T=np.zeros(len(token_ids), dtype=np.float32),
        versions=[],
        temperature=1.0,
    )


def _is_trained(message: ChatMessage, loss_mask: LossMaskConfig) -> bool:
    """Return whether the loss falls on `message`: by the `weight` of the message if it has one, else by its role."""
    if message.get("weight") is not None:
        return bool(message["weight"])
    match message["role"]:
        case "assistant":
            return loss_mask.assistant
        case "user":
            return loss_mask.user
        case "tool":
            return loss_mask.tool
        case _:
            return loss_mask.system


def _pieces(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, loss_mask: LossMaskConfig) -> list[_Piece]:
    """Divide the conversation's text where an answer begins or ends, and find the trained spans of each piece."""
    messages = conversation.messages
    flags = [_is_trained(message, loss_mask) for message in messages]
    is_answer = [message["role"] == "assistant" for message in messages]
    num_used = max((number + 1 for number in range(len(messages)) if flags[number] or is_answer[number]), default=0)
    pieces: list[_Piece] = []
    spans: list[TextSpan] = []
    text, begin = "", 0  # the text rendered so far, and the character at which the current piece begins
    for number in range(num_used):
        if is_answer[number]:
            text = _render(conversation, tokenizer, number, after=text, with_prompt=True)
            pieces.append(_Piece(text=text[begin:], trained=spans))
            begin, spans = len(text), []
            text = _render(conversation, tokenizer, number + 1, after=text)
            answer = text[begin:]
            pieces.append(_Piece(text=answer, trained=[(0, len(answer))] if flags[number] else []))
            begin = len(text)
            continue
        # Templates may merge messages (several tools' answers), so the text is rendered only where the mask changes.
        is_last = number + 1 == len(messages) or is_answer[number + 1]
        if flags[number] if is_last else flags[number] != flags[number + 1]:
            before = len(text) - begin
            text = _render(conversation, tokenizer, number + 1, after=text)
            if flags[number]:
                spans.append((before, len(text) - begin))
    pieces.append(_Piece(text=text[begin:], trained=spans))
    return [piece for piece in pieces if piece.text]


def _render(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    num_messages: int,
    *,
    after: str,
    with_prompt: bool = False,
) -> str:
    """Render the first `num_messages`. The text must continue the text `after`; `with_prompt` adds the header of an answer."""
    messages = [
        {name: value for name, value in message.items() if name != "weight"} for message in conversation.messages[:num_messages]
    ]
    tools = [dict(tool) for tool in conversation.tools] if conversation.tools else None
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,  # type: ignore[reportArgumentType]  # it accepts a list of tables
            tokenize=False,
            add_generation_prompt=with_prompt,
        )
    except TemplateError as exc:
        raise ConfigError(
            f"the chat template cannot render the first {num_messages} of a conversation's {len(conversation.messages)} "
            f"messages ({', '.join(message['role'] for message in messages)}): {exc}; it may need other roles, or "
            "data.loss_mask may part messages that it needs together"
        ) from exc
    except ValueError as exc:
        raise ConfigError(f"the tokenizer has no chat template: {exc}; set tokenizer.chat_template") from exc
    assert isinstance(text, str)
    if not text.startswith(after):
        raise ConfigError(
            f"the chat template rewrites earlier turns: what it makes of the first {num_messages} messages does not continue "
            f"{after[-60:]!r}; use a template that only appends, or conversations of one assistant message"
        )
    return text


def _tokenize(piece: _Piece, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Return the token ids, and for each token whether it is trained on: whether it begins in a trained span.

    A span is trained on up to its last end-of-turn token, because text that templates add after that token is never sampled.
    """
    if not piece.trained or piece.trained == [(0, len(piece.text))]:
        ids = tokenizer.encode(piece.text, add_special_tokens=False)
        token_spans = [[*range(len(ids))]] if piece.trained else []
    else:
        if not tokenizer.is_fast:
            raise ConfigError(
                "data.loss_mask parts a prompt, which needs a tokenizer with the places of its tokens (a fast one)"
            )
        encoded = tokenizer(piece.text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        starts = [start for start, _ in encoded["offset_mapping"]]
        token_spans = [[number for number, start in enumerate(starts) if low <= start < high] for low, high in piece.trained]
    mask = [False] * len(ids)
    for numbers in token_spans:
        ends = [number for number in numbers if ids[number] == tokenizer.eos_token_id]
        for number in numbers:
            mask[number] = not ends or number <= ends[-1]
    return ids, mask
