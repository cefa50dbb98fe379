"""Test, over real sockets, how servers come to have a policy, what they serve afterwards and which are refused."""

import asyncio

import httpx
import pytest

from support.fake_inference import START_DIGEST, FakeInference
from support.http_fake import serve_fake
from support.processes import find_free_port
from trivet.config.layout import RunLayout
from trivet.config.schema.inference import ClientConfig
from trivet.errors import ConfigError, InferenceError
from trivet.evaluation.servers import PLAIN_DIGEST, connect
from trivet.evaluation.targets import BASE, Target
from trivet.weights.manifest import read_manifest
from trivet.weights.publish import publish


@pytest.fixture
def layout(tmp_path):
    layout = RunLayout(tmp_path)
    for version in (1, 2):
        publish(
            layout,
            version=version,
            run_id="run",
            write=lambda path, version=version: (path / "model.safetensors").write_bytes(bytes([version])),
        )
    return layout


class Plain(FakeInference):
    """A server without any of our routes."""

    def _handle(self, request):
        if request.url.path in ("/policy", "/health"):
            return super()._handle(type(request)("GET", "http://fake/nothing"))
        return super()._handle(request)


def target(layout, step):
    return Target(step, layout.weights_step(step))


def use(urls, question, *, weights_dir=None, weights_url=None, timeout_s=5.0):
    async def scenario():
        config = ClientConfig(base_url=urls, wait_for_ready_timeout=timeout_s)
        servers = await connect(config, environ={}, weights_dir=weights_dir, weights_url=weights_url)
        try:
            return await question(servers)
        finally:
            await servers.aclose()
            await servers.aclose()

    return asyncio.run(scenario())


def test_every_server_holds_what_is_evaluated_and_gets_back_what_it_held(layout):
    first, second = FakeInference(), FakeInference()
    first._update(layout.weights_step(1))
    digest = first.digest

    async def question(servers):
        held = []
        for one in (target(layout, 2), BASE, target(layout, 2), target(layout, 2)):
            held.append((await servers.ensure_policy(one), first.version, second.version))
        return (
            held,
            servers.placement.pick(num_rollouts=2),
            servers.placement.pick(num_rollouts=1),
            servers.placement.pick(num_rollouts=1),
        )

    with serve_fake(first) as a, serve_fake(second) as b:
        held, *picked = use([a, b], question, weights_dir=layout.weights)
        assert picked == [root.removesuffix("/v1") for root in (a, b, b)]
    assert [versions for _, *versions in held] == [[2, 2], [0, 0], [2, 2], [2, 2]]
    assert held[1][0] == START_DIGEST
    assert (first.version, first.digest, second.version) == (1, digest, 0)
    assert [path for _, path, _ in second.requests].count("/update_weights") == 2, "what is held already is not loaded again"


@pytest.mark.parametrize("is_up", [True, False])
def test_servers_fetch_from_an_origin_that_answers_and_read_the_directory_otherwise(layout, is_up):
    """The origin runs as long as its run. Both the evaluated policy and the earlier one come from it."""
    server, origin = FakeInference(), FakeInference()
    server._update(layout.weights_step(1))
    if not is_up:
        origin.fail_with = httpx.Response(500)

    async def question(servers):
        return await servers.ensure_policy(target(layout, 2))

    with serve_fake(server) as url, serve_fake(origin) as origin_url:
        weights_url = origin_url.removesuffix("/v1")
        digest = use([url], question, weights_dir=layout.weights, weights_url=weights_url)
    bodies = [body for _, path, body in server.requests if path == "/update_weights"]
    assert digest == read_manifest(layout.weights_step(2)).digest
    expected = [[weights_url], [weights_url]] if is_up else [None, None]
    assert [body.get("sources") for body in bodies] == expected
    assert server.version == 1


def test_a_server_that_is_down_is_named_with_what_to_do():
    port = find_free_port()
    with pytest.raises(ConfigError, match=rf"no server answers at http://127\.0\.0\.1:{port} .*uv run inference"):
        use([f"http://127.0.0.1:{port}/v1"], lambda servers: servers.model_names(), timeout_s=0.2)


def test_a_server_that_holds_a_policy_which_could_not_be_put_back_is_refused(layout, tmp_path):
    fake = FakeInference()
    fake._update(layout.weights_step(2))
    with serve_fake(fake) as url:
        for weights_dir in (None, tmp_path / "elsewhere"):
            with pytest.raises(ConfigError, match=r"serves policy 2 .* could not be restored .*/reload_weights"):
                use([url], lambda servers: servers.ensure_policy(BASE), weights_dir=weights_dir)
    assert fake.version == 2
    assert [method for method, _, _ in fake.requests if method == "POST"] == []


def test_a_plain_server_is_asked_as_it_is(layout):
    fake = Plain(model="other/model")

    async def question(servers):
        root = servers.placement.pick(num_rollouts=1)
        servers.placement.release(root, num_rollouts=1)
        with pytest.raises(ConfigError, match=r"is not `uv run inference` and loads no weights: it can be evaluated as it is"):
            await servers.ensure_policy(target(layout, 1))
        return (
            servers.is_plain,
            await servers.model_names(),
            await servers.ensure_policy(BASE),
            await servers.placement.is_at_fault(root),
        )

    with serve_fake(fake) as url:
        assert use([url], question) == (True, ["other/model"], PLAIN_DIGEST, False)
    assert [method for method, _, _ in fake.requests if method == "POST"] == []


def test_servers_of_two_kinds_are_refused():
    with serve_fake(Plain()) as a, serve_fake(FakeInference()) as b, pytest.raises(ConfigError) as refused:
        use([a, b], lambda servers: servers.ensure_policy(BASE))
    assert f"trivet servers ({b.removesuffix('/v1')}) and others ({a.removesuffix('/v1')})" in str(refused.value)


def test_a_directory_that_a_server_refuses_is_an_error_and_nothing_stays_loaded(layout):
    fake = FakeInference()
    (layout.weights_step(1) / "model.safetensors").write_bytes(b"altered")
    with serve_fake(fake) as url, pytest.raises(InferenceError, match=r"409: .*model\.safetensors"):
        use([url], lambda servers: servers.ensure_policy(target(layout, 1)), weights_dir=layout.weights)
    assert fake.version == 0
