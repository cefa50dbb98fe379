"""Does a run on a Ray cluster survive what happens to clusters? Real Ray, roles, gloo and vLLM; each machine is some namespaces.

Draws faults from a seed: machines lost with all their processes, links cut in one direction or both, frames lost or late, a shared
directory that is slow or hangs, a full disk, a clock an hour off, processes of Ray and the driver killed, machines asked to end, a
second driver. Starts again what a scheduler would, and proves afterwards from the history that nothing was lost or done twice, that
the last step was reached, and that no role is left on any machine. Fails otherwise.

    uv run python scripts/chaos_nodes.py --seed 7 --faults 40 [--output /tmp/chaos] [--record docs/benchmarks/chaos_nodes.json]

It needs root, ip, mfusepy with Debian's fuse3, and a C compiler. The last line is one JSON object.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bench.training import hardware

from support.cluster_run import ClusterRun
from support.node_chaos import FAULTS, NodeChaos, can_mount, draw_node_faults
from support.nodes import can_make_nodes
from support.ray_nodes import make_ray_nodes
from support.tiny_models import tiny_model_writer

MAX_STEPS = 100_000  # more than the run takes before the last fault
KEYS = """
min_train_nodes = 1
return_timeout_s = 60
num_env_nodes = 1
env_cpus_per_node = 1
env_resources = { sandbox = 1 }
"""


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--output", type=Path, help="an empty or new directory; default: a temporary one that is kept")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    if not (can_make_nodes() and shutil.which("cc") and can_mount()):
        raise SystemExit("it needs root, ip, mfusepy, Debian's fuse3 and a C compiler")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what was started is ended, not left behind
    directory = arguments.output or Path(tempfile.mkdtemp(prefix="trivet-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    print(f"output in {directory}", flush=True)
    tiny_model_writer()(directory / "model")
    schedule = draw_node_faults(arguments.seed, num_faults=arguments.faults, among=arguments.kinds)
    started = time.monotonic()
    with make_ray_nodes(6, directory=directory) as nodes:
        model = directory / "model"
        run = ClusterRun(directory, model, nodes, max_steps=MAX_STEPS, num_train_nodes=2, num_servers=2, keys=KEYS)
        chaos = NodeChaos(run=run, directory=directory, seed=arguments.seed, num_env_machines=1)
        endured, report = chaos.carry_out(schedule, say=lambda line: print(line, flush=True))
    summary = {
        "bench": "chaos_nodes",
        "hardware": hardware(),
        "seed": arguments.seed,
        "machines": nodes.count,
        "faults": len(endured),
        "faults_by_kind": dict(sorted(Counter(item.kind for item in endured).items())),
        "steps": report.last_step,
        "steps_done_again": report.voided_steps,
        "starts_of_the_driver": sum(item.starts for item in endured),
        "groups": report.groups.state.dispatched,
        "statements_proven": report.ledger.checks,
        "seconds": round(time.monotonic() - started, 1),
        "endured": [{**asdict(item), "seconds": round(item.seconds, 1)} for item in endured],
    }
    if arguments.record is not None:
        arguments.record.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
