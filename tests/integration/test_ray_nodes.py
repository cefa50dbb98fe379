"""A Ray cluster in namespaces behaves as one of several machines does, and leaves nothing behind."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.nodes import can_make_nodes
from support.processes import assert_all_gone, wait_until
from support.ray_nodes import RayNodes, make_ray_nodes

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_make_nodes(), reason="making network namespaces needs root and ip")]
PROGRAM = Path(__file__).parents[1] / "support" / "ray_program.py"
CUT_S = 5.0
NOTICED_S = 120.0
PATIENCE = {
    **os.environ,
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "8",
}
"""Ray gives a silent machine up after 16 to 32 seconds, not after a minute."""


class Driver:
    """A driver on machine 0 with an actor on each of the machines 0 to 2."""

    def __init__(self, nodes: RayNodes, directory: Path) -> None:
        self._log = directory / "driver.out"
        command = [sys.executable, str(PROGRAM), "3"]
        self._process = nodes.start(0, command, log=self._log, environ=nodes.environ(os.environ))

    def await_look(self, is_wanted: Callable[[list[Any], list[str]], bool], what: str) -> list[Any]:
        """Wait for a new look at the cluster, with the actors' answers and the living machines, that is wanted."""
        offset = self._log.stat().st_size

        def find() -> list[Any] | None:
            assert self._process.poll() is None, self._log.read_text()
            lines = self._log.read_bytes()[offset:].decode().split("\n")[:-1]
            looks = [json.loads(line) for line in lines if line.startswith("{")]
            return next((look["counts"] for look in looks if is_wanted(look["counts"], look["alive"])), None)

        wait_until(find, timeout_s=NOTICED_S, waiting_for=what)
        found = find()
        assert found is not None
        return found


def test_a_lost_machine_is_dead_to_ray_and_a_cut_one_comes_back_with_its_state(tmp_path: Path) -> None:
    with make_ray_nodes(3, directory=tmp_path) as nodes:
        addresses = [nodes.address(machine) for machine in range(3)]
        nodes.start_head(num_cpus=1, environ=PATIENCE)
        nodes.join(1)
        nodes.join(2, resources={"sandbox": 1}, labels={"kind": "spare"})
        driver = Driver(nodes, tmp_path)

        def all_answer(counts: list[Any], _: list[str]) -> bool:
            return all(isinstance(count, list) for count in counts)

        before = driver.await_look(all_answer, "an answer of each actor")
        assert sorted(address for address, _ in before) == addresses  # each on its own machine

        cut = before.index(next(count for count in before if count[0] == addresses[1]))
        nodes.disconnect(1)
        driver.await_look(lambda counts, _: counts[cut] == "GetTimeoutError", "the silence of a cut machine")
        time.sleep(CUT_S)
        nodes.connect(1)
        after = driver.await_look(all_answer, "the return of a cut machine")
        assert after[cut][0] == addresses[1]
        assert after[cut][1] > before[cut][1]  # the same process: its count goes on

        nodes.lose(2)
        driver.await_look(lambda _, alive: alive == addresses[:2], "Ray to notice a lost machine")
        nodes.connect(2)
        nodes.boot(2)
        nodes.join(2)
        driver.await_look(lambda _, alive: alive == addresses, "the return of a lost machine")
        seen = [process for machine in range(3) for process in map(psutil.Process, nodes.pids(machine))]
    assert_all_gone(seen)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert nodes.name not in listed
    assert nodes.name not in Path("/proc/self/mountinfo").read_text()
    assert not Path("/tmp", nodes.name).exists()
