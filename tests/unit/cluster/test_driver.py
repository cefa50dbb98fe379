"""A machine that does not fit the run is refused with the reason; nodes without the output directory get what they read."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.fake_roles import make_facts
from trivet.cluster.driver import check_machine
from trivet.cluster.messages import ActorSettings
from trivet.dependencies import own_version
from trivet.errors import ConfigError

SETTINGS = ActorSettings(
    node=0,
    working_dir=Path("/work"),
    output_dir=Path("outputs"),
    driver_host="10.0.0.1",
    lost_after_s=30.0,
    does_log_json=False,
    own_directories=frozenset({1}),
)


def check(node: int, **facts: Any) -> None:
    changed = {"version": own_version(), **facts}
    check_machine(node, msgspec.structs.replace(make_facts(), **changed), settings=SETTINGS)


@pytest.mark.parametrize("facts", [{"does_see_lock": False}, {"has_working_dir": False}])
def test_only_a_node_that_shares_the_directory_must_see_it(facts: dict[str, Any]) -> None:
    check(0)
    check(1, **facts)
    with pytest.raises(ConfigError, match=r"node 0 \(machine-1\) (does not see .* locked 'outputs'|has no directory)"):
        check(0, **facts)


def test_every_node_has_the_same_version() -> None:
    with pytest.raises(ConfigError, match=r"node 1 .* has trivet 0\.0\.0, this machine"):
        check(1, version="0.0.0")


def test_a_machine_that_would_be_slow_is_only_named(capsys: pytest.CaptureFixture[str]) -> None:
    check(1, niceness=15)
    assert "niceness 15" in capsys.readouterr().err
