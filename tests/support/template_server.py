"""A server of chat completions that is exact about tokens: a real tokenizer, real chat templates, scripted answers.

It writes conversations as vLLM does, keeps the tokens of known turns with the product's own rule, and samples the scripted text
in tokens that its tokenizer would not have chosen. `turns` is what it read and sampled.

server = TemplateServer("qwen3", answers=["<think>\nhm\n</think>\nyes<|im_end|>"], seed=1)
http = server.http()

`served_url` puts it on a real port.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from support.http_fake import serve
from support.served_turns import ServedTurn
from trivet.inference.continuation import continue_tokens
from trivet.wire.versions import PolicyVersion, VersionRun

_TEMPLATES = Path(__file__).parent / "templates"
BAR, SPACE = "\uff5c", "\u2581"
"""The spelling of DeepSeek's special tokens."""
SENTENCE_END = f"<{BAR}end{SPACE}of{SPACE}sentence{BAR}>"
STOPS = ["<|im_end|>", "<|eot_id|>", SENTENCE_END]
_SPECIAL = [
    *STOPS,
    "<|im_start|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    f"<{BAR}begin{SPACE}of{SPACE}sentence{BAR}>",
    f"<{BAR}User{BAR}>",
    f"<{BAR}Assistant{BAR}>",
    "<think>",
    "</think>",
]


class TemplateServer:
    def __init__(
        self,
        template: str,
        *,
        answers: Sequence[str],
        seed: int = 0,
        parses_reasoning: bool = False,
        max_model_len: int = 100_000,
    ) -> None:
        """
        Args:
            answers: what is sampled in each turn; one that ends with no stop token was cut, and may end within a letter.
            seed: of how the answers are split into tokens.
            parses_reasoning: what is thought is answered in a field of its own.
        """
        self.tokenizer = make_tokenizer(template)
        self.turns: list[ServedTurn] = []
        self.seeds: list[int | None] = []
        """The parameters of each request."""
        self._answers = answers
        self._random = random.Random(seed)
        self._parses_reasoning = parses_reasoning
        self._max_model_len = max_model_len

    def http(self) -> httpx.AsyncClient:
        """A connection to it without a port."""
        return httpx.AsyncClient(transport=httpx.MockTransport(lambda request: self.answer(request.content)))

    @contextmanager
    def served_url(self) -> Iterator[str]:
        """Its base URL while it listens on a port."""

        def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
            assert (method, path) == ("POST", "/v1/chat/completions"), f"{method} {path}"
            response = self.answer(body)
            return response.status_code, response.content

        with serve(answer) as url:
            yield url

    def answer(self, content: bytes) -> httpx.Response:
        """Its answer to a chat-completions request."""
        body = json.loads(content)
        self.seeds.append(body.get("seed"))
        text = write_conversation(self.tokenizer, body["messages"], tools=body.get("tools"))
        read = self._read(text, body.get("known_token_ids"))
        if len(read) > self._max_model_len:
            return _refusal(f"This model's maximum context length is {self._max_model_len} tokens.")
        if len(read) == self._max_model_len:
            return _refusal("max_tokens must be at least 1, got 0.")
        sampled = self._sample(self._answers[len(self.turns)])
        version = PolicyVersion(len(self.turns))
        turn = ServedTurn(
            text=text,
            read=read,
            sampled=sampled,
            logprobs=[-1.0 - token_id / 1024 for token_id in sampled],
            versions=[VersionRun(version, len(sampled))] if sampled else [],
        )
        self.turns.append(turn)
        return httpx.Response(200, json=self._answer(turn))

    def _read(self, text: str, known: list[int] | None) -> list[int]:
        continued = continue_tokens(known, text=text, tokenizer=self.tokenizer) if known else None
        return continued or self.tokenizer.encode(text, add_special_tokens=False)

    def _sample(self, text: str) -> list[int]:
        """Tokenize the answer after cutting it at random places, but not within a special token."""
        marks = "|".join(re.escape(special) for special in _SPECIAL)
        token_ids: list[int] = []
        for part in re.split(f"({marks})", text):
            while part:
                length = len(part) if part in _SPECIAL else self._random.randint(1, len(part))
                token_ids += self.tokenizer.encode(part[:length], add_special_tokens=False)
                part = part[length:]
        ends_within_a_letter = not text.endswith(tuple(STOPS)) and not text[-1:].isascii()
        return token_ids[:-1] if ends_within_a_letter else token_ids

    def _answer(self, turn: ServedTurn) -> dict[str, Any]:
        text = self.tokenizer.decode(turn.sampled, skip_special_tokens=False).rstrip("\ufffd")
        stop = next((stop for stop in STOPS if text.endswith(stop)), "")
        message = self._message(text.removesuffix(stop))
        choice = {
            "index": 0,
            "finish_reason": ("tool_calls" if message.get("tool_calls") else "stop") if stop else "length",
            "message": message,
            "token_ids": turn.sampled,
            "logprobs": {"content": [{"token": "", "logprob": logprob, "top_logprobs": []} for logprob in turn.logprobs]},
            "policy_versions": [[run.version, run.length] for run in turn.versions],
        }
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
            "prompt_token_ids": turn.read,
        }

    def _message(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._parses_reasoning:
            thought, mark, said = text.partition("</think>")
            if mark:
                message |= {"reasoning": thought.removeprefix("<think>"), "content": said}
        calls = re.findall(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", message["content"], re.DOTALL)
        bare = re.fullmatch(r'\s*(\{\s*"name".*"parameters".*\})\s*', message["content"], re.DOTALL)
        if calls or bare:
            message["tool_calls"] = [_tool_call(index, call) for index, call in enumerate(calls or bare.groups())]
            message["content"] = None if bare else message["content"].split("<tool_call>")[0].strip() or None
        return message


def _refusal(message: str) -> httpx.Response:
    return httpx.Response(400, json={"error": {"message": message, "type": "BadRequestError", "code": 400}})


def _tool_call(index: int, text: str) -> dict[str, Any]:
    call = json.loads(text)
    arguments = json.dumps(call.get("arguments", call.get("parameters")))
    return {"id": f"call-{index}", "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def write_conversation(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] | None
) -> str:
    """Write the conversation as vLLM does, up to the place where the model continues."""
    text = tokenizer.apply_chat_template(
        [_as_vllm_passes(message) for message in messages], tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert isinstance(text, str)
    return text


def _as_vllm_passes(message: dict[str, Any]) -> dict[str, Any]:
    """Give the template the arguments of tool calls as objects, and no content as an empty one."""
    passed = {**message, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        passed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return passed


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer with some merges and one of the chat templates in this directory. The caller may change
    it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer()),
        chat_template=(_TEMPLATES / f"{template}.jinja").read_text(),
        clean_up_tokenization_spaces=False,
    )


@cache
def _trained_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=_SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([path.read_text() for path in sorted(_TEMPLATES.iterdir())], trainer)
    return tokenizer.to_str()
