"""Does any input end a command in a traceback, hang it or fill the memory? Generated TOML files, flags, variables, records of data,
histories, metrics and paths, most of them tried in one process, some as commands of their own.

The last line is one JSON object: the number of cases by kind, the longest time that one took, and the most memory that the process
had. docs/benchmarks/fuzz.json keeps it. Fails with the smallest input that a command does not bear, above 2 s and above 300 MB.

    uv run python scripts/fuzz_inputs.py [--cases 5000] [--seed 1]
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.fuzz import Fuzzer, peak_rss_mib

MAX_S, MAX_RSS_MIB = 2.0, 300.0 * 1e6 / 2**20
SHARES = {"toml": 5, "flags": 5, "variables": 3, "data": 3, "paths": 3, "events": 1, "metrics": 1}
PROCESSES = (
    ["trivet.launcher.commands.trainer", "--dry-run", "@"],
    ["trivet.orchestrator.main", "--dry-run", "--output-dir"],
    ["trivet.cli.main", "status"],
    ["trivet.cli.main", "check"],
)
TEXTS = ("x" * 5000, "~nouser-here/x", "\udcff", "\u00fc" * 70, "[" * 5000, "..", "/dev/null", "")


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=16, help="cases tried as commands of their own")
    parser.add_argument("--kind", choices=SHARES, help="only this kind")
    arguments = parser.parse_args()
    kinds = {arguments.kind: 1} if arguments.kind else SHARES
    with tempfile.TemporaryDirectory(prefix="trivet-fuzz-") as directory:
        fuzzer = Fuzzer(Path(directory), seed=arguments.seed)
        for kind, share in kinds.items():
            fuzzer.run(kind, cases=-(-arguments.cases * share // sum(kinds.values())))
            print(kind, asdict(fuzzer.tried[kind]), flush=True)
    in_process = {kind: fuzzer.tried[kind] for kind in kinds}
    rss_mib = peak_rss_mib()
    worst_s = max(tried.worst_s for tried in in_process.values())
    processes = try_processes(arguments.processes, seed=arguments.seed)
    result = {
        "config": {"cases": arguments.cases, "seed": arguments.seed},
        "versions": {"python": platform.python_version()},
        "hardware": {"cpus": os.cpu_count(), "machine": platform.machine()},
        "cases": sum(tried.cases for tried in in_process.values()) + arguments.processes,
        "worst_s": round(worst_s, 3),
        "peak_rss_mib": round(rss_mib, 1),
        "kinds": {kind: asdict(tried) for kind, tried in in_process.items()},
        "processes": processes,
    }
    print(json.dumps(result))
    if worst_s > MAX_S or rss_mib > MAX_RSS_MIB:
        sys.exit(f"a case took {worst_s:.2f} s and the process {rss_mib:.0f} MiB: more than {MAX_S} s or {MAX_RSS_MIB:.0f} MiB")


def try_processes(count: int, *, seed: int) -> dict[str, object]:
    """Run commands with odd arguments. Imports, which take seconds, are part of their time."""
    random, worst_s = Random(seed), 0.0
    for _ in range(count):
        command = [sys.executable, "-P", "-m", *random.choice(PROCESSES), random.choice(TEXTS)]
        started = time.perf_counter()
        ended = subprocess.run(command, capture_output=True, timeout=120, check=False)
        worst_s = max(worst_s, time.perf_counter() - started)
        if ended.returncode not in (0, 1, 2) or b"Traceback" in ended.stderr:
            sys.exit(f"{command[3:]} ended with {ended.returncode}:\n{ended.stderr.decode(errors='replace')}")
    children_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {"cases": count, "worst_s": round(worst_s, 3), "peak_rss_mib": round(children_mib, 1)}


if __name__ == "__main__":
    main()
