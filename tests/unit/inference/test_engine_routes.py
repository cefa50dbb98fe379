"""The record of which engine has a request, over a restart: with a client that does with it what vLLM's does."""

from collections import Counter

from trivet.inference.engine_routes import EngineRoutes


class FakeRouting:
    """Chooses engines and ends requests like `DPLBAsyncMPClient`; test_vllm_names does the same with that class itself."""

    def __init__(self) -> None:
        self.reqs_in_flight: dict[str, bytes] = {}
        self.engine_inflight: Counter[bytes] = Counter()

    def add(self, request_id: str) -> bytes:
        if (engine := self.reqs_in_flight.get(request_id)) is not None:
            return engine
        engine = min((b"0", b"1"), key=self.engine_inflight.__getitem__)
        self.reqs_in_flight[request_id] = engine
        self.engine_inflight[engine] += 1
        return engine

    def end(self, request_id: str) -> None:
        if (engine := self.reqs_in_flight.pop(request_id, None)) is not None:
            self.engine_inflight[engine] -= 1


def open_routes() -> tuple[FakeRouting, EngineRoutes]:
    client = FakeRouting()
    routes = EngineRoutes.install(client)
    assert routes is not None
    return client, routes


def test_a_restarted_request_is_still_found_and_counted_until_it_ends() -> None:
    client, routes = open_routes()
    engines = {name: client.add(name) for name in ("a", "b")}
    routes.forget_all_but({"a", "b"})
    routes.expect_end_of(["a"])
    assert client.add("a") == engines["a"]
    client.end("a")  # the late report about the attempt that was aborted
    assert client.reqs_in_flight == engines
    assert client.engine_inflight == {b"0": 1, b"1": 1}
    client.end("a")
    assert client.reqs_in_flight == {"b": engines["b"]}
    assert client.engine_inflight[engines["a"]] == 0


def test_the_report_may_come_before_the_request_is_sent_again() -> None:
    client, routes = open_routes()
    engine = client.add("a")
    routes.expect_end_of(["a"])
    client.end("a")
    assert client.add("a") == engine
    assert client.engine_inflight[engine] == 1


def test_a_request_that_was_not_sent_again_is_forgotten_at_the_next_switch() -> None:
    client, routes = open_routes()
    engine = client.add("a")
    routes.expect_end_of(["a"])
    client.end("a")
    routes.forget_all_but(set())
    assert client.reqs_in_flight == {}
    assert client.engine_inflight[engine] == 0


def test_a_request_that_the_engine_does_not_have_is_not_kept() -> None:
    client, routes = open_routes()
    routes.expect_end_of(["gone"])
    client.add("gone")
    client.end("gone")
    assert client.reqs_in_flight == {}


def test_a_client_of_a_single_engine_keeps_no_record() -> None:
    assert EngineRoutes.install(object()) is None
