"""Compares a server's answers with plain transformers on the same weights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.oracle import Oracle
from support.servers import open_client, run_server
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


def answer_prompts(base_url: str, *, reload_from: Path | None = None) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probabilities of each prompt, asked one after the other, after a reload if there is one."""

    async def ask() -> list[tuple[list[int], list[float]]]:
        async with aclosing(open_client(base_url, timeout_s=240)) as client:
            if reload_from is not None:
                await client.update_weights(reload_from)
            found = [await greedy(client, prompt) for prompt in PROMPTS]
            return [(list(each.token_ids), list(each.logprobs)) for each in found]

    return asyncio.run(ask())


def assert_reload_equals_start(start: Path, policy: Path, *, logs: Path, **flags: str) -> None:
    """Check that a server that loads `policy` after it served `start` answers as one that was started with it, to the last bit."""
    paths = [logs / name / "inference.stdout" for name in ("reloaded", "fresh")]
    for path in paths:
        path.parent.mkdir()
    with run_server(start, log=paths[0], **flags) as server:
        before = answer_prompts(server.base_url)
        reloaded = answer_prompts(server.base_url, reload_from=policy)
    with run_server(policy, log=paths[1], **flags) as server:
        fresh = answer_prompts(server.base_url)
    assert reloaded == fresh
    assert before != fresh


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
