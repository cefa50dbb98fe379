from types import SimpleNamespace

from trivet.client.inference_client import PolicyStatus
from trivet.client.server_set import Server, ServerSet, TargetPolicy
from trivet.wire.events import Event, Load, ServerDown, ServerUp
from trivet.wire.versions import PolicyVersion

A, B = "http://a", "http://b"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_set(*roots: str) -> tuple[ServerSet, list[Server], list[Event], Clock]:
    events, clock = list[Event](), Clock()
    servers = ServerSet(write_event=events.append, clock=clock)
    servers.target = TargetPolicy(version=PolicyVersion(3), digest="d", directory=None)
    added = [servers.add(SimpleNamespace(base_url=root)) for root in roots]  # type: ignore[arg-type]  # asked nothing
    for server in added:
        server.status = PolicyStatus(version=PolicyVersion(3), digest="d", probe_mismatch=1e-6, probe_limit=1e-3)
    return servers, added, events, clock


def test_a_server_takes_rollouts_from_its_admission_until_it_is_unhealthy():
    servers, (a, b), events, _ = make_set(A, B)
    assert servers.pick(num_rollouts=1) is None
    servers.admit(b)
    assert servers.pick(num_rollouts=1) == B
    servers.mark_unhealthy(b, "it did not answer")
    servers.mark_unhealthy(a, "was never admitted")
    assert servers.pick(num_rollouts=1) is None
    assert [type(event) for event in events] == [Load, ServerUp, ServerDown]


def test_rollouts_go_to_the_server_with_the_fewest_in_flight():
    servers, added, _, _ = make_set(A, B)
    for server in added:
        servers.admit(server)
    assert [servers.pick(num_rollouts=size) for size in (8, 2, 2)] == [A, B, B]
    servers.release(A, num_rollouts=8)
    assert servers.pick(num_rollouts=1) == A


def test_rollouts_of_a_removed_server_may_end_later():
    servers, [a], _, _ = make_set(A)
    assert servers.remove(A) is a
    servers.release(A, num_rollouts=4)
    assert servers.find(A) is None


def test_subscribers_hear_of_every_server_that_comes_or_is_lost():
    servers, [a], _, _ = make_set(A)
    heard: list[str] = []
    servers.subscribe(on_down=heard.append, on_up=lambda: heard.append("up"))
    servers.admit(a)
    servers.mark_unhealthy(a, "it crashed")
    assert heard == ["up", A]


def test_the_time_without_servers_counts_from_the_loss_of_the_last():
    servers, (a, b), _, clock = make_set(A, B)
    servers.admit(a)
    servers.admit(b)
    assert servers.empty_s is None
    clock.now = 10.0
    servers.mark_unhealthy(a, "it crashed")
    assert servers.empty_s is None
    clock.now = 20.0
    servers.mark_unhealthy(b, "it crashed")
    clock.now = 25.0
    assert servers.empty_s == 5.0
