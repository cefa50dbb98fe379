"""A real server with a tiny random model that takes its chat template from the request, and grammars that make it say something."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from support.servers import ServerProcess, run_server
from support.template_server import STOPS, make_tokenizer
from support.tiny_models import write_tiny_model

TEMPLATES = ["chatml", "hermes", "qwen3", "llama3", "deepseek_r1"]
CALL = r'(I add\.\n\n)?<tool_call>\n?\{"name": ?"add", ?"arguments": ?\{"a": ?[1-9][0-9]?, ?"b": ?[0-9]\}\}\n?</tool_call>'
THOUGHT = r"<think>\n[a-z ]{1,20}\n</think>\n\n"
WORDS = r"(message|content|tool|[a-z]| ){3,12}"


@contextmanager
def run_templates_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose tokenizer knows the special tokens of every template."""
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, tokenizer=make_tokenizer("hermes"))
    flags = {
        "model.enable-auto-tool-choice": "true",
        "model.tool-call-parser": "hermes",
        "vllm-args": '{"trust_request_chat_template": true}',
    }
    with run_server(directory, log=tmp_path_factory.mktemp("server") / "inference.stdout", **flags) as server:
        yield server


def make_model_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose template ends turns as the model does."""
    tokenizer = make_tokenizer(template)
    for stop in STOPS:
        tokenizer.chat_template = tokenizer.chat_template.replace(stop, STOPS[0])
    return tokenizer


def model_name(base_url: str) -> str:
    return httpx.get(f"{base_url}/v1/models", timeout=60).json()["data"][0]["id"]
