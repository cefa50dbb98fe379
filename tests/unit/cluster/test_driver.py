"""A machine that does not fit the run is refused with the reason; nodes without the output directory get what they read."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.fake_roles import make_facts
from trivet.cluster.driver import Driver, check_machine
from trivet.cluster.host import ClusterHost
from trivet.cluster.messages import ActorSettings, Observed
from trivet.cluster.table import NodeTable
from trivet.config.dump import to_toml
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import RunIdentity
from trivet.dependencies import own_version
from trivet.errors import ConfigError
from trivet.launcher.placement import place

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


def test_nodes_with_own_directories_get_the_secret_and_the_configurations_of_their_processes(tmp_path: Path) -> None:
    deployment = {"type": "multi_node", "gpus_per_node": 0, "num_infer_replicas": 2, "num_env_nodes": 1}
    config = RLConfig.model_validate({"output_dir": str(tmp_path), "deployment": deployment})
    placement = place(config)
    table = NodeTable({node: placement.listeners_on(node) for node in range(4)}, lost_after_s=1e9)
    for node in range(4):
        ports = {name: 4000 + number for number, name in enumerate(placement.listeners_on(node))}
        observed = Observed(session=0, observed_at=1, time=0, facts=make_facts(host=f"10.0.0.{node}"), ports=ports)
        table.receive(node, observed, now=time.monotonic(), unix_time=0.0)
    secret = {str(tmp_path / ".secret"): "token"}
    driver = Driver(host=ClusterHost(table), python="python", secrets=dict.fromkeys((1, 2, 3), secret))
    planned = driver.plan(config, RunIdentity(id="run"), None)
    sent = [message.files for node in range(4) if (message := table.next_message(node)) is not None]
    names = [sorted(Path(name).relative_to(tmp_path).as_posix() for name in files) for files in sent]
    assert names == [
        [],
        [".secret", "configs/inference.toml"],
        [".secret", "configs/inference-1.toml"],
        [".secret", "configs/orchestrator.toml"],
    ]
    path = tmp_path / "configs" / "inference.toml"
    assert sent[1] == secret | {str(path): to_toml(planned.configs[path])}


def test_every_node_has_the_same_version() -> None:
    with pytest.raises(ConfigError, match=r"node 1 .* has trivet 0\.0\.0, this machine"):
        check(1, version="0.0.0")


def test_a_machine_that_would_be_slow_is_only_named(capsys: pytest.CaptureFixture[str]) -> None:
    check(1, niceness=15)
    assert "niceness 15" in capsys.readouterr().err
