"""How soon is the page of a long run there, in a real browser, and what does its server need?

A run directory of 10,000 steps and 100,000 rollouts is made up (`--run` takes another). Each of `--repeat` times a new server and a
new browser open each page: nothing is warm but the disk's cache, and what the server reads ahead while the browser starts. Measured
from the start of the navigation, by the browser: the first content painted, and the page complete. The ceiling is a page without
data: the same server on a run of one step.

    .venv/bin/python scripts/install_browser.py
    .venv/bin/python scripts/bench/view.py [--groups-per-step 100]

With `--groups-per-step 100` the history has a million groups.
The last line is one JSON object.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.big_run import write_run
from support.browser import Browser, is_installed

PAGES = {"curves": "", "timeline": "#/timeline", "rollouts": "#/rollouts", "evals": "#/evals", "config": "#/config"}
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
READY = "performance.getEntriesByName('trivet-ready')[0]?.startTime"


def main() -> int:
    """Run the benchmark; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="an output directory, instead of one that is made up")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts-per-step", type=int, default=10)
    parser.add_argument(
        "--groups-per-step",
        type=int,
        help="groups that the history records for each step; default: one for each eight rollouts",
    )
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    if not is_installed():
        print("no headless browser: run .venv/bin/python scripts/install_browser.py", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        small = write_run(Path(scratch, "small"), num_steps=1).root
        large = arguments.run
        if large is None:
            large = write_run(
                Path(scratch, "large"),
                num_steps=arguments.steps,
                rollouts_per_step=arguments.rollouts_per_step,
                groups_per_step=arguments.groups_per_step,
            ).root
        pages = {name: measure(large, fragment, repeat=arguments.repeat) for name, fragment in PAGES.items()}
        ceiling = measure(small, "", repeat=arguments.repeat)
    result = {
        "bench": "view",
        "steps": arguments.steps if arguments.run is None else None,
        "rollouts": arguments.steps * arguments.rollouts_per_step if arguments.run is None else None,
        "groups": arguments.steps * arguments.groups_per_step if arguments.run is None and arguments.groups_per_step else None,
        "repeat": arguments.repeat,
        "ready_ms": pages["curves"]["ready_ms"],
        "ready_ms_of_an_empty_run": ceiling["ready_ms"],
        "pages": pages,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": psutil.cpu_count(),
    }
    print(json.dumps(result))
    return 0


def measure(run: Path, fragment: str, *, repeat: int) -> dict[str, Any]:
    """Return the medians, and the slowest, over as many servers and browsers."""
    found = [measure_once(run, fragment) for _ in range(repeat)]
    medians = {name: round(statistics.median(one[name] for one in found), 1) for name in found[0]}
    return {**medians, "slowest_ready_ms": round(max(one["ready_ms"] for one in found), 1)}


def measure_once(run: Path, fragment: str) -> dict[str, float]:
    """Measure one server with one browser."""
    server = subprocess.Popen([sys.executable, "-m", "trivet.tools.cli", "view", str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = next(word for word in server.stdout.readline().split() if word.startswith("http"))
        with Browser() as browser:
            page = browser.open(url + fragment)
            ready_ms = page.wait_for(READY)
            painted_ms = page.wait_for(PAINTED)
            assert not page.complaints(), page.complaints()
            return {
                "painted_ms": painted_ms,
                "ready_ms": ready_ms,
                "received_kb": page.received_bytes() / 1000,
                "server_rss_mb": psutil.Process(server.pid).memory_info().rss / 1e6,
            }
    finally:
        server.terminate()
        server.wait(timeout=20)


if __name__ == "__main__":
    raise SystemExit(main())
