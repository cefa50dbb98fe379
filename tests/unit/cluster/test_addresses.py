"""A node finds the address at which others reach it."""

import socket

import pytest

from trivet.cluster import addresses
from trivet.cluster.addresses import interface_of, own_address
from trivet.errors import ConfigError
from trivet.process.sockets import address_towards

DEFAULT_ROUTE = "192.0.2.1"


def fake_routes(monkeypatch: pytest.MonkeyPatch, routes: dict[str, str]) -> None:
    """Have this machine reach the hosts in `routes` from the address there, and no other host."""

    def towards(host: str) -> str:
        if host not in routes:
            raise OSError("no way there")
        return routes[host]

    monkeypatch.setattr(addresses, "address_towards", towards)


def test_the_way_to_loopback_and_its_interface_are_found() -> None:
    assert address_towards("127.0.0.7").startswith("127.")
    assert interface_of("127.0.0.1") == "lo"


@pytest.mark.parametrize("address", ["203.0.113.77", "2001:db8::77", "node7"])
def test_an_address_of_nobody_here_has_no_interface(address: str) -> None:
    assert interface_of(address) == ""


@pytest.mark.parametrize(
    ("named", "routes", "found"),
    [
        pytest.param("10.0.0.9", {"10.0.0.9": "10.0.0.5", DEFAULT_ROUTE: "172.16.0.5"}, "10.0.0.5", id="the scheduler's name"),
        pytest.param(None, {DEFAULT_ROUTE: "172.16.0.5"}, "172.16.0.5", id="no name from a scheduler"),
        pytest.param("10.0.0.9", {DEFAULT_ROUTE: "172.16.0.5"}, "172.16.0.5", id="a name that nobody knows"),
        pytest.param(
            "127.0.1.1", {"127.0.1.1": "127.0.0.1", DEFAULT_ROUTE: "172.16.0.5"}, "172.16.0.5", id="a name for loopback"
        ),
        pytest.param(None, {"this-host": "10.0.0.5"}, "10.0.0.5", id="no default route"),
        pytest.param(None, {DEFAULT_ROUTE: "::1", "this-host": "fd00::5"}, "fd00::5", id="loopback of IPv6"),
    ],
)
def test_the_first_node_has_the_first_address_that_is_not_loopback(
    monkeypatch: pytest.MonkeyPatch, named: str | None, routes: dict[str, str], found: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "this-host")
    fake_routes(monkeypatch, routes)
    assert own_address(named) == found


def test_a_machine_with_nothing_but_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "this-host")
    fake_routes(monkeypatch, {"this-host": "127.0.1.1", "127.0.1.1": "127.0.0.1"})
    for named in (None, "10.0.0.9", "127.0.1.1"):
        with pytest.raises(ConfigError, match="/etc/hosts"):
            own_address(named)
