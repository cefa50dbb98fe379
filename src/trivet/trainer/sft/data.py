"""Turns conversations into samples: rendered by the chat template, tokenized, masked by role. Called by `trainer.sft.batches`.

The loss falls on the messages that `loss_mask` selects. Of the assistant's message that is the answer with its end of turn; the
header of its turn is given to the model and never trained on. Of another message it is all text that the template makes of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trivet.config.schema.sft import LossMaskConfig
from trivet.conversations.records import ChatMessage, Conversation
from trivet.errors import ConfigError
from trivet.wire.rollouts import Sample

TokenSpan = tuple[int, int]
"""First and last character of a text, the last not included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A text that is tokenized by itself, as when the model is asked: a prompt, or an answer."""

    text: str
    trained: Sequence[TokenSpan]


def to_sample(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, *, loss_mask: LossMaskConfig | None = None
) -> Sample:
    """Make the token ids and loss mask of a conversation, up to the last message that is an answer or trained on.

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


def is_trained(message: ChatMessage, loss_mask: LossMaskConfig) -> bool:
    """Tell whether the loss falls on `message`: by its own `weight` if it has one, else by its role."""
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
    messages = conversation.messages
    flags = [is_trained(message, loss_mask) for message in messages]
    is_answer = [message["role"] == "assistant" for message in messages]
    wanted = [number for number in range(len(messages)) if flags[number] or is_answer[number]]
    text = _GrowingText(conversation, tokenizer)
    pieces: list[_Piece] = []
    spans: list[TokenSpan] = []
    begin = 0
    for number in range(wanted[-1] + 1 if wanted else 0):
        if is_answer[number]:
            text.extend(number, with_prompt=True)
            pieces.append(_Piece(text=text.done[begin:], trained=spans))
            begin, spans = len(text.done), []
            text.extend(number + 1)
            answer = text.done[begin:]
            pieces.append(_Piece(text=answer, trained=[(0, len(answer))] if flags[number] else []))
            begin = len(text.done)
        elif _is_boundary(number, flags, is_answer):
            before = len(text.done) - begin
            text.extend(number + 1)
            if flags[number]:
                spans.append((before, len(text.done) - begin))
    pieces.append(_Piece(text=text.done[begin:], trained=spans))
    return [piece for piece in pieces if piece.text]


def _is_boundary(number: int, flags: Sequence[bool], is_answer: Sequence[bool]) -> bool:
    """Tell whether the end of message `number` must be known.

    Templates may draw messages together (several tools' answers), so the end is asked for only where the mask changes.
    """
    is_last = number + 1 == len(flags)
    if is_last or is_answer[number + 1]:
        return flags[number]
    return flags[number] != flags[number + 1]


@dataclass(slots=True)
class _GrowingText:
    """The text of a conversation, rendered further and further."""

    conversation: Conversation
    tokenizer: PreTrainedTokenizerBase
    done: str = field(default="")

    def extend(self, num_messages: int, *, with_prompt: bool = False) -> None:
        """Render up to the end of message `num_messages`, counted from 1; `with_prompt` adds the header of the answer."""
        text = self._render(num_messages, with_prompt=with_prompt)
        if not text.startswith(self.done):
            raise ConfigError(
                f"the chat template rewrites earlier turns: what it makes of the first {num_messages} messages does not continue "
                f"{self.done[-60:]!r}; use a template that only appends, or conversations of one assistant message"
            )
        self.done = text

    def _render(self, num_messages: int, *, with_prompt: bool) -> str:
        conversation = self.conversation
        messages = [
            {name: value for name, value in message.items() if name != "weight"}
            for message in conversation.messages[:num_messages]
        ]
        tools = [dict(tool) for tool in conversation.tools] if conversation.tools else None
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,  # type: ignore[reportArgumentType]  # a list of tables is what it takes
                tokenize=False,
                add_generation_prompt=with_prompt,
            )
        except TemplateError as exc:
            raise ConfigError(
                f"the chat template cannot render the first {num_messages} of a conversation's {len(conversation.messages)} "
                f"messages ({', '.join(message['role'] for message in messages)}): {exc}; it may need other roles, or "
                "data.loss_mask may part messages that it wants together"
            ) from exc
        except ValueError as exc:
            raise ConfigError(f"the tokenizer has no chat template: {exc}; set tokenizer.chat_template") from exc
        assert isinstance(text, str)
        return text


def _tokenize(piece: _Piece, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Return the token ids, and for each whether it is trained on: whether it begins in a trained span."""
    if not piece.trained or piece.trained == [(0, len(piece.text))]:
        ids = tokenizer.encode(piece.text, add_special_tokens=False)
        numbers = [*range(len(ids))] if piece.trained else []
        return ids, _mask(ids, [numbers], tokenizer)
    if not tokenizer.is_fast:
        raise ConfigError(
            "data.loss_mask parts a prompt, which needs a tokenizer that knows where its tokens begin (a fast one)"
        )
    encoded = tokenizer(piece.text, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(encoded["input_ids"])
    starts = [start for start, _ in encoded["offset_mapping"]]
    spans = [[number for number, start in enumerate(starts) if low <= start < high] for low, high in piece.trained]
    return ids, _mask(ids, spans, tokenizer)


def _mask(ids: Sequence[int], spans: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """Return a mask that is true on each span up to its last end-of-turn token.

    Text that templates add after that token is never sampled.
    """
    mask = [False] * len(ids)
    for numbers in spans:
        ends = [number for number in numbers if ids[number] == tokenizer.eos_token_id]
        for number in numbers:
            mask[number] = not ends or number <= ends[-1]
    return mask
