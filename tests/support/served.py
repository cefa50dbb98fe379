"""Compares a server's answers with plain transformers on the same weights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.oracle import Oracle
from trivet.client.inference_client import Generation, InferenceClient

PROMPTS = [[5, 6, 7, 8], [99, 102, 68, 69, 70, 100, 2, 99, 103], list(range(4, 90))]
CHAT = {"messages": [{"role": "user", "content": "abc"}], "logprobs": True, "return_token_ids": True}


async def greedy(client: InferenceClient, prompt: list[int], *, num_tokens: int = 24) -> Generation:
    return await client.generate(prompt, max_tokens=num_tokens, temperature=0.0)


async def assert_serves(client: InferenceClient, directory: Path) -> None:
    """Check that greedy outputs are those of the whole model in `directory`, up to a stop token."""
    oracle = Oracle(directory)
    answers = await asyncio.gather(*(greedy(client, prompt) for prompt in PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.token_ids == oracle.greedy(prompt, num_tokens=len(answer.token_ids))
        expected = oracle.logprobs(prompt, answer.token_ids, temperature=1.0)
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)


async def chat(base_url: str, **fields: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=base_url, timeout=300) as http:
        response = await http.post("/v1/chat/completions", json={**CHAT, **fields})
    response.raise_for_status()
    return response.json()


@asynccontextmanager
async def busy(base_url: str, *, num_tokens: int = 20) -> AsyncIterator[None]:
    """Let the engine sample a long completion. Its first `num_tokens` tokens show that earlier requests have tokens too."""
    body = {**CHAT, "stream": True, "max_tokens": 900, "ignore_eos": True}
    http = httpx.AsyncClient(base_url=base_url, timeout=480)
    async with http, http.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.aiter_lines()
        while num_tokens:
            num_tokens -= '"token_ids":[' in await anext(lines)
        yield
