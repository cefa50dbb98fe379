"""The real server with adapters, compared with plain PEFT and transformers."""

import asyncio
import json
import shutil
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.adapters import publish_adapter, write_adapter, write_merged
from support.oracle import Oracle
from support.served import CHAT, assert_serves, chat
from support.servers import bearer, open_client
from support.tiny_models import publish_tiny_model
from trivet.config.layout import RunLayout
from trivet.errors import InferenceError

pytestmark = pytest.mark.vllm


def assert_sampled_from(answer: dict[str, Any], directory: Path) -> None:
    choice = answer["choices"][0]
    expected = Oracle(directory).logprobs(answer["prompt_token_ids"], choice["token_ids"], temperature=1.0)
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == pytest.approx(expected, abs=1e-4)


def test_a_completion_that_spans_a_new_adapter_carries_both_versions(
    inference_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path)
    publish_adapter(layout, base=tiny_model, version=1)
    merged = write_merged(tmp_path / "merged", adapter=layout.weights_step(1), base=tiny_model)

    async def scenario() -> None:
        async with aclosing(open_client(inference_server, timeout_s=480)) as client, asyncio.TaskGroup() as tasks:
            spanning = tasks.create_task(chat(inference_server, max_tokens=900, ignore_eos=True), name="spanning")
            body = {**CHAT, "stream": True, "max_tokens": 900, "ignore_eos": True}
            http = httpx.AsyncClient(base_url=inference_server, timeout=480)
            async with http, http.stream("POST", "/v1/chat/completions", json=body) as stream:
                lines, seen = stream.aiter_lines(), 0
                while seen < 20:
                    seen += '"token_ids":[' in await anext(lines)
                await client.update_weights(layout.weights_step(1))
                fresh = await chat(inference_server, max_tokens=8)
        choice = spanning.result()["choices"][0]
        runs = choice["policy_versions"]
        assert [version for version, _ in runs] == [0, 1]
        switch = runs[0][1]
        sampled = [token["logprob"] for token in choice["logprobs"]["content"]]
        expected = Oracle(tiny_model).logprobs(spanning.result()["prompt_token_ids"], choice["token_ids"], temperature=1.0)
        assert sampled[:switch] == pytest.approx(expected[:switch], abs=1e-4)
        assert sampled[switch] != pytest.approx(expected[switch], abs=1e-4)
        # The same prompt is answered while the other goes on, without any key or value of the policy before.
        assert fresh["choices"][0]["policy_versions"] == [[1, len(fresh["choices"][0]["token_ids"])]]
        assert_sampled_from(fresh, merged)

    asyncio.run(scenario())


def test_an_adapter_after_whole_weights_stands_on_the_start_model_again(
    inference_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path)
    publish_tiny_model(layout, version=1)
    publish_adapter(layout, base=tiny_model, version=2)
    merged = write_merged(tmp_path / "merged", adapter=layout.weights_step(2), base=tiny_model)

    async def scenario() -> None:
        async with aclosing(open_client(inference_server, timeout_s=240)) as client:
            await client.update_weights(layout.weights_step(2))
            await client.update_weights(layout.weights_step(1))
            await assert_serves(client, layout.weights_step(1))
            await client.update_weights(layout.weights_step(2))
            await assert_serves(client, merged)

    asyncio.run(scenario())


def test_an_adapter_that_does_not_fit_leaves_the_policy_before_served(
    inference_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path)
    publish_adapter(layout, base=tiny_model, version=1)
    publish_adapter(layout, base=tiny_model, version=2, rank=32)
    other = shutil.copytree(tiny_model, tmp_path / "other")
    publish_adapter(layout, base=other, version=3)
    merged = write_merged(tmp_path / "merged", adapter=layout.weights_step(1), base=tiny_model)

    async def scenario() -> None:
        async with aclosing(open_client(inference_server, timeout_s=240)) as client:
            await client.update_weights(layout.weights_step(1))
            with pytest.raises(InferenceError, match=r"500: .*rank 32 is greater than max_lora_rank 8.*policy 1 is served"):
                await client.update_weights(layout.weights_step(2))
            with pytest.raises(InferenceError, match=r"409: .*is an adapter for .*other, and this server serves"):
                await client.update_weights(layout.weights_step(3))
            assert (await client.served_policy()).version == 1
            await assert_serves(client, merged)

    asyncio.run(scenario())


def test_adapters_under_names_of_their_own_are_served_beside_the_policy(
    inference_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path)
    publish_adapter(layout, base=tiny_model, version=1)
    policy = write_merged(tmp_path / "policy", adapter=layout.weights_step(1), base=tiny_model)

    def load(name: str, path: Path) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(path)}
        return httpx.post(f"{inference_server}/load_lora_adapter", json=body, headers=bearer(inference_server), timeout=240)

    async def scenario() -> None:
        async with aclosing(open_client(inference_server, timeout_s=240)) as client:
            await client.update_weights(layout.weights_step(1))
            # There are more names than stay loaded. The policy's own adapter must never be removed.
            for seed, name in enumerate(("mine", "mine", "yours", "mine"), start=10):
                adapter = tmp_path / f"adapter_{seed}"
                write_adapter(adapter, base=tiny_model, seed=seed)
                assert load(name, adapter).json() == {"status": "ok", "lora_name": name, "lora_path": str(adapter)}
                answer = await chat(inference_server, model=name, max_tokens=12, seed=1)
                assert_sampled_from(answer, write_merged(tmp_path / f"merged_{seed}", adapter=adapter, base=tiny_model))
                assert "policy_versions" not in answer["choices"][0]
                await assert_serves(client, policy)
        refused = load("mine", tmp_path / "nothing")
        assert refused.status_code == 409
        assert "cannot be served as 'mine'" in refused.json()["reason"]
        assert load(str(tiny_model), tmp_path / "adapter_10").status_code == 409

    asyncio.run(scenario())
    assert json.loads(httpx.get(f"{inference_server}/policy").text)["version"] == 1
