"""Speculative decoding on the real server: tokens, log-probabilities, versions and a reload in the middle of a completion."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest

from support.oracle import Oracle
from support.processes import wait_until
from support.served import assert_serves, chat
from support.servers import ServerProcess, open_client, run_server
from support.tiny_models import publish_tiny_model
from trivet.config.layout import RunLayout

pytestmark = pytest.mark.vllm
PROMPT = [5, 6, 7, 8] * 8
"""It repeats itself, and a random model that always takes the likeliest token soon does so too: drafts are accepted."""


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def server(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    directory, settings = tmp_path_factory.mktemp(request.param), {"method": request.param, "num_speculative_tokens": 4}
    if request.param == "draft_model":
        # The model itself: nearly every draft of it is accepted, until the policy changes and the draft model does not.
        settings["model"] = str(tiny_model)
    else:
        settings |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    with run_server(
        tiny_model,
        log=directory / "inference.stdout",
        **{"vllm_args.speculative_config": json.dumps(settings), "max_num_seqs": "8"},
    ) as started:
        yield started


def count_accepted(server: ServerProcess) -> float:
    metrics = httpx.get(f"{server.base_url}/metrics", timeout=60).text
    found = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, found))


def test_tokens_and_their_logprobs_are_those_of_the_model_alone(server: ServerProcess, tiny_model: Path) -> None:
    async def scenario() -> None:
        async with aclosing(open_client(server.base_url, timeout_s=240)) as client:
            await assert_serves(client, tiny_model)
            answer = await client.generate(PROMPT, max_tokens=200, temperature=0.0)
            expected = Oracle(tiny_model).logprobs(PROMPT, answer.token_ids, temperature=1.0)
            assert answer.logprobs == pytest.approx(expected, abs=1e-4)
        sampled = await chat(server.base_url, temperature=0.4, seed=3, max_tokens=200, n=2)
        for choice in sampled["choices"]:
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            expected = Oracle(tiny_model).logprobs(sampled["prompt_token_ids"], choice["token_ids"], temperature=0.4)
            assert logprobs == pytest.approx(expected, abs=1e-4)
            assert choice["policy_versions"] == [[0, len(choice["token_ids"])]]

    asyncio.run(scenario())
    assert count_accepted(server) > 20, "without accepted drafts the test shows nothing"


def test_a_completion_around_a_reload_names_the_policy_of_each_token(
    server: ServerProcess, tiny_model: Path, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path)
    publish_tiny_model(layout, version=1)

    async def scenario() -> None:
        async with aclosing(open_client(server.base_url, timeout_s=240)) as client:
            before = count_accepted(server)
            running = asyncio.create_task(client.generate(PROMPT, max_tokens=900, temperature=0.0))
            await asyncio.to_thread(
                wait_until,
                lambda: count_accepted(server) >= before + 20,
                timeout_s=120,
                waiting_for="accepted drafts",
            )
            await client.update_weights(layout.weights_step(1))
            answer = await running
            assert [run.version for run in answer.versions] == [0, 1]
            num_old = answer.versions[0].length
            assert num_old + answer.versions[1].length == len(answer.token_ids) == len(answer.logprobs)
            old = Oracle(tiny_model).logprobs(PROMPT, answer.token_ids[: num_old + 1], temperature=1.0)
            assert answer.logprobs[:num_old] == pytest.approx(old[:num_old], abs=1e-4)
            assert answer.logprobs[num_old] != pytest.approx(old[num_old], abs=1e-2), "the next token is of the new policy"
            await assert_serves(client, layout.weights_step(1))
            again = await client.generate(PROMPT, max_tokens=100, temperature=0.0)
            assert [run.version for run in again.versions] == [1], "no key of the old policy is reused"
            expected = Oracle(layout.weights_step(1)).logprobs(PROMPT, again.token_ids, temperature=1.0)
            assert again.logprobs == pytest.approx(expected, abs=1e-4)
            await client.reload_weights()

    asyncio.run(scenario())
