from collections import Counter

from trivet.inference.engine_records import PolicyLedger, RequestEngines, TokenVersions
from trivet.wire.versions import PolicyVersion, VersionRun


def test_a_token_belongs_to_the_last_policy_switched_to_before_it() -> None:
    ledger = PolicyLedger()
    ledger.switch(PolicyVersion(1), at=10.0)
    ledger.switch(PolicyVersion(2), at=20.0)
    # Whenever a token arrives, the time at which it was made counts.
    assert [ledger.version_at(time) for time in (0.0, 9.9, 10.0, 19.9, 20.0, 99.0)] == [0, 0, 1, 1, 2, 2]


def test_going_back_to_an_earlier_policy_is_a_switch_like_any_other() -> None:
    ledger = PolicyLedger()
    ledger.switch(PolicyVersion(1), at=1.0)
    ledger.switch(PolicyVersion(0), at=2.0)
    assert (ledger.num_switches, ledger.version_at(3.0)) == (2, 0)


def test_versions_are_run_length_encoded_for_each_completion_of_a_request() -> None:
    versions = TokenVersions()
    versions.record(0, num_tokens=2, version=PolicyVersion(4))
    versions.record(1, num_tokens=1, version=PolicyVersion(4))
    versions.record(0, num_tokens=1, version=PolicyVersion(4))
    versions.record(0, num_tokens=1, version=PolicyVersion(5))
    assert versions.runs == {
        0: [VersionRun(PolicyVersion(4), 3), VersionRun(PolicyVersion(5), 1)],
        1: [VersionRun(PolicyVersion(4), 1)],
    }


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


def open_routes() -> tuple[FakeRouting, RequestEngines]:
    client = FakeRouting()
    routes = RequestEngines.install(client)
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


def test_a_client_of_a_single_engine_keeps_no_record() -> None:
    assert RequestEngines.install(object()) is None
