"""Runs a launcher with stand-in roles in a process, for tests that end, stop and interrupt its processes."""

import json
import subprocess
import sys
from pathlib import Path

import psutil

from support.processes import (
    assert_all_gone,
    assert_port_free,
    descendants_of,
    descendants_with,
    find_free_port,
    heed_signals,
    kill_all,
    wait_until,
)
from trivet.config.layout import RunLayout

STAND_IN_RUN = Path(__file__).with_name("stand_in_run.py")
ROLES = ("inference", "orchestrator", "trainer")
STARTED_WITHIN_S = ENDED_WITHIN_S = 120.0


class StandInRun:
    """A launcher in its own directory, seen from outside."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = [find_free_port() for _ in ROLES]
        self.processes: list[psutil.Process] = []
        self.layout = RunLayout(directory)
        self.recovery: dict[str, float | str] = {"max_restarts": 0}
        """The section `[recovery]`. By default the first failure ends the run."""
        self._out = directory / "rl.out"

    def start(self, inference: str = "serve", orchestrator: str = "serve", trainer: str = "serve") -> "StandInRun":
        """Start the launcher, and wait until every role listens."""
        self.launch(inference, orchestrator, trainer)
        self.wait_up()
        return self

    def wait_up(self, *names: str, attempt: int | None = None) -> None:
        """Wait until the named roles, or all, listen; if `attempt` is given, those of that attempt."""
        paths = [self.directory / f"{name}.up" for name in names or ROLES]
        wait_until(
            lambda: all(path.exists() and (attempt is None or path.read_text() == str(attempt)) for path in paths),
            timeout_s=STARTED_WITHIN_S,
            waiting_for=f"the roles to start: {self.output}",
        )
        self.processes = [*self.processes, psutil.Process(self.launcher.pid), *descendants_of(self.launcher.pid)]

    def wait_for_output(self, text: str, *, timeout_s: float = 120.0) -> None:
        wait_until(lambda: text in self.output, timeout_s=timeout_s, waiting_for=f"{text!r} in {self.output}")

    def launch(self, *behaviours: str) -> "subprocess.Popen[bytes]":
        with self._out.open("wb") as out:
            self.launcher = subprocess.Popen(
                [sys.executable, str(STAND_IN_RUN), json.dumps(self.recovery), *behaviours, *map(str, self.ports)],
                cwd=self.directory,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=heed_signals,
            )
        return self.launcher

    def act(self, name: str) -> None:
        """Let the role do what its behaviour says."""
        (self.directory / f"{name}.go").touch()

    def process_of(self, name: str) -> psutil.Process:
        found = descendants_with(f" {name} ", self.launcher.pid)
        assert found, f"no process of {name}: {self.output}"
        return found[0]

    def wait(self) -> int:
        return self.launcher.wait(ENDED_WITHIN_S)

    @property
    def output(self) -> str:
        return self._out.read_text()

    def assert_nothing_left(self) -> None:
        assert_all_gone(self.processes)
        for port in self.ports:
            assert_port_free(port)

    def close(self) -> None:
        self.launcher.kill()
        self.launcher.wait()
        kill_all(self.processes)
