import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from support.fake_inference import START_DIGEST, FakeInference
from trivet.client.inference_client import InferenceClient
from trivet.client.server_load import ServerLoad, read_load
from trivet.config.layout import RunLayout
from trivet.errors import InferenceError, ServerGone
from trivet.weights.publish import publish
from trivet.wire.versions import FetchablePolicy, PolicyStatus, PolicyVersion, VersionRun

T = TypeVar("T")


class Clock:
    """Time that passes only in sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def ask(server: FakeInference, question: Callable[[InferenceClient], Awaitable[T]], *, base_url: str = "http://fake") -> T:
    async def scenario() -> T:
        clock = Clock()
        client = InferenceClient(
            base_url,
            timeout_s=5,
            headers={"Authorization": "Bearer key"},
            transport=server.transport,
            clock=clock,
            sleep=clock.sleep,
        )
        async with aclosing(client):
            return await question(client)

    return asyncio.run(scenario())


def publish_policy(root: Path, *, version: int) -> Path:
    layout = RunLayout(root)
    publish(
        layout,
        version=PolicyVersion(version),
        run_id="test",
        write=lambda directory: (directory / "model.safetensors").write_bytes(b"weights") and None,
    )
    return layout.weights_step(version)


@pytest.mark.parametrize("base_url", ["http://fake", "http://fake/", "http://fake/v1", "http://fake/v1/"])
def test_the_base_url_is_accepted_with_and_without_v1(base_url: str) -> None:
    server = FakeInference(model="some/model")
    assert ask(server, lambda client: client.model_name(), base_url=base_url) == "some/model"
    assert server.requests == [("GET", "/v1/models", {})]


def test_loading_a_policy_reports_its_version_and_digest(tmp_path: Path) -> None:
    server = FakeInference()
    directory = publish_policy(tmp_path, version=7)
    status = ask(server, lambda client: client.update_weights(directory))
    assert status.version == 7
    assert ask(server, lambda client: client.served_policy()) == status
    assert ask(server, lambda client: client.reload_weights()) == PolicyStatus(version=PolicyVersion(0), digest=START_DIGEST)


def test_only_what_changes_the_server_carries_the_token_of_the_run(tmp_path: Path) -> None:
    directory, sent = publish_policy(tmp_path, version=7), dict[str, str | None]()

    def answer(request: httpx.Request) -> httpx.Response:
        sent[request.url.path] = request.headers.get("authorization")
        return server._handle(request)

    server = FakeInference()

    async def scenario() -> None:
        client = InferenceClient(
            "http://fake",
            timeout_s=5,
            headers={"Authorization": "Bearer key"},
            find_token=lambda: "token",
            transport=httpx.MockTransport(answer),
        )
        await client.update_weights(directory)
        await client.reload_weights()
        await client.sleep()
        await client.served_policy()
        await client.model_name()
        await client.aclose()

    asyncio.run(scenario())
    assert sent == {
        "/update_weights": "Bearer token",
        "/reload_weights": "Bearer token",
        "/sleep": "Bearer token",
        "/policy": "Bearer key",
        "/v1/models": "Bearer key",
    }


def test_a_server_that_still_fetches_is_asked_again_and_never_sent_to_itself() -> None:
    sources = ("http://origin:5556", "http://fake", "http://other:8000")
    policy = FetchablePolicy(version=PolicyVersion(3), digest="d", manifest_sha256="m", sources=sources)
    bodies: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        version, is_fetching = (2, True) if len(bodies) < 3 else (3, False)
        return httpx.Response(200, json={"version": version, "digest": "d", "is_fetching": is_fetching})

    async def scenario() -> PolicyStatus:
        client = InferenceClient("http://fake/v1", timeout_s=5, transport=httpx.MockTransport(answer))
        status = await client.fetch_weights(policy)
        await client.aclose()
        return status

    assert asyncio.run(scenario()).version == 3
    fields = {"version": 3, "digest": "d", "manifest_sha256": "m", "sources": ["http://origin:5556", "http://other:8000"]}
    assert bodies == [fields] * 3


def test_the_server_is_sent_an_absolute_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeInference()
    directory = publish_policy(tmp_path, version=1)
    monkeypatch.chdir(tmp_path)
    ask(server, lambda client: client.update_weights(directory.relative_to(tmp_path)))
    assert server.requests[-1][2] == {"weight_dir": str(directory)}


def test_a_refused_directory_is_an_error_with_the_url_the_status_and_the_reason(tmp_path: Path) -> None:
    directory = publish_policy(tmp_path, version=1)
    (directory / "STABLE").unlink()
    with pytest.raises(InferenceError, match=r"POST http://fake/update_weights was answered with 409: .* has no STABLE"):
        ask(FakeInference(), lambda client: client.update_weights(directory))


def test_generation_carries_ids_logprobs_and_the_policy_of_each_token() -> None:
    server = FakeInference(script=lambda body: [(token_id, -0.25) for token_id in reversed(body["token_ids"])])
    server.version = 3
    answer = ask(server, lambda client: client.generate([5, 6], max_tokens=2, temperature=0.7, seed=1))
    assert (answer.token_ids, answer.logprobs, answer.versions) == (
        [6, 5],
        [-0.25, -0.25],
        [VersionRun(PolicyVersion(3), 2)],
    )
    assert server.requests[-1][2]["sampling_params"] == {"max_tokens": 2, "temperature": 0.7, "seed": 1, "logprobs": 0}


def test_messages_are_completed_with_the_tokens_that_were_read_and_sampled() -> None:
    server = FakeInference(model="m", script=lambda _: [(7, -0.5)])
    messages = [{"role": "user", "content": "hello"}]
    answer = ask(server, lambda client: client.complete_chat(messages, model="m", fields={"temperature": 0.5, "top_k": 4}))
    assert (answer.prompt_ids, answer.token_ids, answer.logprobs) == ([1, 2, 3], [7], [-0.5])
    assert answer.versions == [VersionRun(PolicyVersion(0), 1)]
    [(_, path, body)] = server.requests
    assert path == "/v1/chat/completions"
    assert body == {
        "messages": messages,
        "model": "m",
        "logprobs": True,
        "return_token_ids": True,
        "temperature": 0.5,
        "top_k": 4,
    }


def test_waiting_ends_when_the_engine_answers_or_at_the_deadline_with_what_it_met() -> None:
    server = FakeInference()
    server.num_unhealthy = 3
    ask(server, lambda client: client.wait_ready(60))
    assert len(server.requests) == 4
    server.num_unhealthy = 1000
    with pytest.raises(InferenceError, match=r"http://fake was not ready within 10 s: .*503: starting"):
        ask(server, lambda client: client.wait_ready(10))


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (httpx.ConnectError("refused"), r"GET http://fake/policy failed: ConnectError: refused"),
        (httpx.ReadTimeout("slow"), r"GET http://fake/policy was not answered within 5 s"),
        (httpx.Response(404, json={"error": {"message": "no such model"}}), r"404: no such model"),
        (httpx.Response(502, text="bad gateway"), r"502: bad gateway"),
        (httpx.Response(200, json={"version": "x"}), r"answered what is not a PolicyStatus"),
        (httpx.Response(200, text="<html>"), r"answered what is not a PolicyStatus .*<html>"),
    ],
)
def test_every_failure_names_what_was_asked_of_whom(failure: httpx.Response | Exception, message: str) -> None:
    server = FakeInference()
    server.fail_with = failure
    with pytest.raises(InferenceError, match=message):
        ask(server, lambda client: client.served_policy())


def test_a_server_that_never_answers_costs_no_more_than_the_timeout() -> None:
    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> None:
        client = InferenceClient("http://fake", timeout_s=0.01, transport=httpx.MockTransport(never))
        async with aclosing(client):
            with pytest.raises(InferenceError, match="was not answered within"):
                await client.served_policy()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("failure", "is_ours"),
    [
        (None, True),
        (httpx.Response(404, json={"error": {"message": "no route"}}), False),
        (httpx.Response(401, json={"error": {"message": "no key"}}), False),
        (httpx.Response(200, html="<html>a page</html>"), False),
    ],
)
def test_a_server_of_ours_is_told_from_others(failure: httpx.Response | None, is_ours: bool) -> None:
    server = FakeInference()
    server.fail_with = failure
    assert ask(server, lambda client: client.serves_policies(timeout_s=5)) is is_ours


@pytest.mark.parametrize(
    ("cause", "is_gone"),
    [(ConnectionRefusedError(111, "refused"), True), (socket.gaierror(-2, "Name or service not known"), False)],
)
def test_a_server_is_gone_only_when_its_host_refuses_the_connection(cause: OSError, is_gone: bool) -> None:
    failure = httpx.ConnectError("All connection attempts failed")
    failure.__cause__ = cause
    server = FakeInference()
    server.fail_with = failure
    with pytest.raises(InferenceError) as caught:
        ask(server, lambda client: client.sleep())
    assert isinstance(caught.value, ServerGone) is is_gone


METRICS = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 12.0
vllm:num_requests_running{engine="1",model_name="m"} 8.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
"""


def test_the_loads_of_a_servers_engines_are_summed_and_one_that_does_not_say_has_none():
    assert read_load(METRICS) == ServerLoad(num_running=20, num_waiting=3, num_preemptions=4, kv_usage=0.75)
    assert read_load("process_cpu_seconds_total 1.0\n") is None
