"""The real vLLM server with our engine and routes, compared with plain transformers."""

import asyncio
import json
import os
import signal
import time
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
import pytest

from support.oracle import Oracle
from support.processes import wait_until
from support.served import assert_serves, busy, chat, greedy
from support.servers import bearer, open_client, run_server, secret_file
from support.tiny_models import publish_tiny_model
from trivet.config.layout import MANIFEST, RunLayout
from trivet.errors import InferenceError
from trivet.process.signals import STACKS_SIGNAL
from trivet.secret import make_secret
from trivet.storage.durable import write_json_atomically
from trivet.weights.manifest import make_manifest
from trivet.wire.versions import PolicyVersion

OPEN = {"/health", "/ping", "/policy", "/version", "/load", "/metrics", "/tokenize", "/detokenize", "/inference/v1/generate"}
pytestmark = pytest.mark.vllm


def test_a_model_with_its_own_head_is_reloaded_whole_and_sigterm_ends_the_server(
    tiny_model_untied: Path, tmp_path: Path
) -> None:
    async def scenario(base_url: str) -> None:
        async with aclosing(open_client(base_url, timeout_s=240)) as client:
            await assert_serves(client, tiny_model_untied)
            layout = RunLayout(tmp_path)
            publish_tiny_model(layout, version=1, tied=False)
            await client.update_weights(layout.weights_step(1))
            await assert_serves(client, layout.weights_step(1))

    with run_server(tiny_model_untied, log=tmp_path / "inference.stdout") as server:
        asyncio.run(scenario(server.base_url))
        engine = server.engine_processes()
        server.process.terminate()
        assert server.process.wait(120) == 128 + signal.SIGTERM
        log = server.log.read_text()
        assert "is used by process" not in log, "nobody has the port any more when vLLM looks"
        assert "policy loaded version=1" in log, "no import of vLLM's has turned off the server's own lines"
        assert engine
        assert psutil.wait_procs(engine, timeout=60)[1] == []


def test_a_server_says_where_it_is_and_goes_on_and_killing_it_leaves_no_engine_process(
    tiny_model: Path, tmp_path: Path
) -> None:
    with run_server(tiny_model, log=tmp_path / "inference.stdout") as server:
        os.kill(server.process.pid, STACKS_SIGNAL)
        wait_until(lambda: "innermost await last" in server.log.read_text(), timeout_s=60, waiting_for="the server's tasks")
        assert httpx.get(f"{server.base_url}/health", timeout=60).status_code == 200, "it goes on"
        engine = server.engine_processes()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(60)
        assert engine
        assert psutil.wait_procs(engine, timeout=60)[1] == []


def test_a_directory_that_is_not_whole_is_refused_and_the_old_policy_goes_on(
    inference_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with aclosing(open_client(inference_server, timeout_s=240)) as client:
            layout = RunLayout(tmp_path)
            publish_tiny_model(layout, version=1)
            weights = layout.weights_step(1) / "model.safetensors"
            intact = weights.read_bytes()
            weights.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
            with pytest.raises(InferenceError, match=r"409: .*model\.safetensors does not match"):
                await client.update_weights(layout.weights_step(1))
            weights.write_bytes(intact[:-8])
            with pytest.raises(InferenceError, match=r"409: .*model\.safetensors has \d+ bytes"):
                await client.update_weights(layout.weights_step(1))
            with pytest.raises(InferenceError, match=r"409: .*was not published completely"):
                await client.update_weights(layout.weights_step(2))
            assert (await client.served_policy()).version == 0
            await assert_serves(client, tiny_model)

    asyncio.run(scenario())


def test_weights_from_elsewhere_are_not_read(inference_server: str) -> None:
    async def scenario(elsewhere: Path) -> None:
        async with aclosing(open_client(inference_server, timeout_s=240)) as client:
            layout = RunLayout(elsewhere)
            publish_tiny_model(layout, version=1)
            with pytest.raises(InferenceError, match=r"409: .*is not below .*inference\.server\.weight_dirs"):
                await client.update_weights(layout.weights_step(1))
            assert (await client.served_policy()).version == 0

    with TemporaryDirectory() as elsewhere:  # pytest's own directories are among the server's weight_dirs
        asyncio.run(scenario(Path(elsewhere)))


def test_a_policy_that_the_engine_cannot_load_leaves_the_old_one_served(
    inference_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with aclosing(open_client(inference_server, timeout_s=240)) as client:
            layout = RunLayout(tmp_path)
            publish_tiny_model(layout, version=1)
            layout.weights_step(1).joinpath("model.safetensors").write_bytes(b"not weights")
            manifest = make_manifest(layout.weights_step(1), version=PolicyVersion(1))
            write_json_atomically(layout.weights_step(1) / MANIFEST, manifest)
            with pytest.raises(InferenceError, match=r"500: .*policy 0 is served again"):
                await client.update_weights(layout.weights_step(1))
            assert (await client.served_policy()).version == 0
            await assert_serves(client, tiny_model)

    asyncio.run(scenario())


def test_sampled_logprobs_are_those_of_the_distribution_sampled_from(inference_server: str, tiny_model: Path) -> None:
    async def scenario() -> None:
        oracle = Oracle(tiny_model)
        answer = await chat(inference_server, temperature=0.7, seed=3, max_tokens=48, n=2)
        for choice in answer["choices"]:
            sampled = [token["logprob"] for token in choice["logprobs"]["content"]]
            expected = oracle.logprobs(answer["prompt_token_ids"], choice["token_ids"], temperature=0.7)
            assert sampled == pytest.approx(expected, abs=1e-4)
            assert choice["policy_versions"] == [[0, len(choice["token_ids"])]]
        assert answer["choices"][0]["token_ids"] != answer["choices"][1]["token_ids"]

    asyncio.run(scenario())


@pytest.mark.parametrize("output_mode", ["tokens", "text"])
def test_completions_of_token_ids_carry_versions_in_every_mode(inference_server: str, output_mode: str) -> None:
    sampling = {"max_tokens": 12, "temperature": 1.0, "seed": 2, "n": 2, "logprobs": 0}
    body = {"token_ids": [5, 6, 7, 8], "sampling_params": sampling, "output_mode": output_mode}
    answer = httpx.post(f"{inference_server}/inference/v1/generate", json=body, timeout=240)
    answer.raise_for_status()
    choices = answer.json()["choices"]
    assert [choice["policy_versions"] for choice in choices] == [[[0, len(choice["token_ids"])]] for choice in choices]
    assert ["text" in choice for choice in choices] == [output_mode == "text"] * 2


def test_no_prefix_of_an_older_policy_is_reused_while_a_request_keeps_the_cache_from_being_reset(
    inference_server: str, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path)
    publish_tiny_model(layout, version=1)
    prompt = [4 + index % 90 for index in range(600)]

    async def scenario() -> None:
        async with aclosing(open_client(inference_server, timeout_s=480)) as client, busy(inference_server):
            await greedy(client, prompt, num_tokens=2)
            await client.update_weights(layout.weights_step(1))
            answer = await client.generate(prompt, max_tokens=8, temperature=1.0, seed=1)
        assert [run.version for run in answer.versions] == [1]
        expected = Oracle(layout.weights_step(1)).logprobs(prompt, answer.token_ids, temperature=1.0)
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)

    asyncio.run(scenario())


def test_requests_around_an_update_are_answered_by_exactly_the_policies_they_name(
    inference_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Most have no token at the switch, because prompts of 900 tokens are computed two at a time. Those start again."""
    layout = RunLayout(tmp_path)
    publish_tiny_model(layout, version=1)
    oracles = {0: Oracle(tiny_model), 1: Oracle(layout.weights_step(1))}
    prompts = [[4 + (seed + index) % 80 for index in range(900)] for seed in range(32)]

    async def scenario() -> None:
        client = open_client(inference_server, timeout_s=480)
        async with aclosing(client), busy(inference_server), asyncio.TaskGroup() as tasks:
            requests = [
                tasks.create_task(client.generate(prompt, max_tokens=12, temperature=1.0, seed=seed), name=f"seed {seed}")
                for seed, prompt in enumerate(prompts)
            ]
            await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED, timeout=0.1)
            await client.update_weights(layout.weights_step(1))
        for prompt, request in zip(prompts, requests, strict=True):
            answer = request.result()
            assert sum(run.length for run in answer.versions) == len(answer.token_ids)
            if len(answer.versions) == 1:
                expected = oracles[answer.versions[0].version].logprobs(prompt, answer.token_ids, temperature=1.0)
                assert answer.logprobs == pytest.approx(expected, abs=1e-4)
        assert any(answer.result().versions[0].version == 1 for answer in requests)

    asyncio.run(scenario())


def test_a_bad_request_is_told_what_is_wrong_with_it(inference_server: str) -> None:
    response = httpx.post(
        f"{inference_server}/update_weights", json={"weight_dir": "weights/step_1"}, headers=bearer(inference_server)
    )
    assert response.status_code in (400, 422)
    assert "relative" in json.dumps(response.json())


@pytest.mark.parametrize("origin", [None, "https://evil.example"])
def test_no_route_that_changes_the_server_is_open(inference_server: str, origin: str | None) -> None:
    """Ask every route of the real server, with the other verbs too, as a stranger and as a web page would."""
    headers = {"Origin": origin} if origin else {}
    described = httpx.get(f"{inference_server}/openapi.json", headers=bearer(inference_server), timeout=60).json()
    routes = {(verb.upper(), path) for path, verbs in described["paths"].items() for verb in verbs}
    assert {("POST", "/update_weights"), ("POST", "/reload_weights"), ("POST", "/load_lora_adapter")} <= routes
    before = httpx.get(f"{inference_server}/policy", timeout=60).json()
    codes = {
        (verb, path): httpx.request(verb, inference_server + path, headers=headers, json={}, timeout=60).status_code
        for verb, path in sorted(routes)
    }
    is_open = {path for (_, path), code in codes.items() if code != 401}
    print("open routes:", *sorted(is_open))
    assert not [path for path in is_open if not path.startswith("/v1/") and path not in OPEN]
    assert not [path for path in is_open if "adapter" in path]
    assert httpx.get(f"{inference_server}/policy", timeout=60).json() == before
    preflight = {**headers, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    allowed = httpx.options(f"{inference_server}/update_weights", headers=preflight, timeout=60)
    assert "access-control-allow-origin" not in allowed.headers


def test_an_idle_connection_is_closed_by_the_client_first(inference_server: str) -> None:
    """Leave a connection idle for longer than httpx's clients do: the server must answer on it."""
    with httpx.Client(base_url=inference_server, limits=httpx.Limits(keepalive_expiry=60), timeout=60) as client:
        first = client.get("/health").extensions["network_stream"].get_extra_info("client_addr")
        time.sleep(7)
        assert client.get("/health").extensions["network_stream"].get_extra_info("client_addr") == first


def test_a_page_whose_name_was_led_here_is_refused(inference_server: str) -> None:
    rebound = httpx.post(f"{inference_server}/v1/chat/completions", headers={"Host": "evil.example"}, json={}, timeout=60)
    assert rebound.status_code == 403


def test_a_server_with_a_key_wants_it_or_the_secret_for_answers(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "inference.stdout"
    with run_server(tiny_model, log=log, **{"server.api-key": "asking"}) as server:
        models, policy = f"{server.base_url}/v1/models", f"{server.base_url}/policy"
        assert httpx.get(models, timeout=60).status_code == 401
        assert httpx.get(models, headers={"Authorization": "Bearer asking"}, timeout=60).status_code == 200
        assert httpx.get(models, headers=bearer(server.base_url), timeout=60).status_code == 200
        assert httpx.get(policy, timeout=60).status_code == 200
        asked_to_change = httpx.post(
            f"{server.base_url}/reload_weights", headers={"Authorization": "Bearer asking"}, timeout=60
        )
        assert asked_to_change.status_code == 401
    said = log.read_text()
    assert "asking" not in said
    assert make_secret(secret_file(server.base_url)).token not in said
