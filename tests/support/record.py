"""Records when each test file last passed, how long it took and at which revision: `pytest --record=docs/slow_tests.json`.

A file keeps its entry until it runs again, so one record tells of many sessions. tests/conftest.py registers the plugin.
"""

import json
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write the outcome of each test file that runs into this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--record")
    if path is not None and not hasattr(config, "workerinput"):  # reports of pytest-xdist's workers arrive at their controller
        config.pluginmanager.register(Recorder(path, root=config.rootpath))


class Recorder:
    def __init__(self, path: Path, *, root: Path) -> None:
        self._path, self._root = path, root
        words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        self._revision = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False).stdout.strip()
        self._seconds: Counter[str] = Counter()
        self._outcomes: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of a test's set-up, call or tear-down. A failure in any of the three is the test's outcome."""
        file = report.location[0]
        self._seconds[file] += report.duration
        outcomes = self._outcomes.setdefault(file, {})
        if report.when == "call" or report.outcome != "passed":
            outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        entries = json.loads(self._path.read_bytes()) if self._path.exists() else {}
        now = {"date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "revision": self._revision}
        for file, outcomes in self._outcomes.items():
            counts = Counter(outcomes.values())
            passed = now if counts["passed"] and not counts["failed"] else entries.get(file, {}).get("passed")
            entries[file] = {"last": now | {"seconds": round(self._seconds[file]), **counts}, "passed": passed}
        lines = [f"{json.dumps(file)}: {json.dumps(entries[file])}" for file in sorted(entries) if (self._root / file).exists()]
        self._path.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # a line for each file, as a review shows it
