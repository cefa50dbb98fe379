"""Does a run over several nodes survive what happens to clusters? Real roles, gloo and vLLM; each node is a network namespace.

Draws a schedule from a seed: nodes lost with all their processes, links cut in one direction or both, frames lost or late, a shared
directory that is slow or hangs, a full disk, a clock an hour off, launchers killed, nodes asked to end, a second first node. Starts
again what a scheduler would, and proves afterwards from the history that nothing was lost or done twice, that the last step was
reached, and that nothing is left on any node. Fails otherwise.

    uv run python scripts/chaos_nodes.py --seed 7 --faults 40 [--output /tmp/chaos] [--record docs/benchmarks/chaos_nodes.json]

It needs root, ip, mfusepy with Debian's fuse3, and a C compiler. The last line is one JSON object.
"""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bench.training import hardware

from support.node_chaos import FAULTS, NodeChaos, NodeOutcome, can_mount, can_set_clock, draw_node_faults
from support.node_run import NodeRun
from support.nodes import can_make_nodes, make_nodes
from support.tiny_models import tiny_model_writer

MAX_STEPS = 100_000
"""More than the run takes before the last fault."""


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--train-nodes", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2, help="each has a node")
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--output", type=Path, help="an empty or new directory; default: a temporary one that is kept")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    if not (can_make_nodes() and can_set_clock() and can_mount()):
        raise SystemExit("it needs root, ip, mfusepy, Debian's fuse3 and a C compiler")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what was started is ended, not left behind
    directory = arguments.output or Path(tempfile.mkdtemp(prefix="trivet-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    print(f"output in {directory}", flush=True)
    tiny_model_writer()(directory / "model")
    num_nodes = arguments.train_nodes + arguments.servers
    schedule = draw_node_faults(
        arguments.seed,
        num_faults=arguments.faults,
        num_train_nodes=arguments.train_nodes,
        num_nodes=num_nodes,
        among=arguments.kinds,
    )
    with make_nodes(num_nodes) as nodes:
        run = NodeRun(
            directory,
            directory / "model",
            nodes,
            max_steps=MAX_STEPS,
            num_train_nodes=arguments.train_nodes,
            num_servers=arguments.servers,
        )
        chaos = NodeChaos(run=run, directory=directory, num_train_nodes=arguments.train_nodes)
        outcome = chaos.carry_out(schedule, say=lambda line: print(line, flush=True))
    summary = summarize(outcome, seed=arguments.seed, num_nodes=num_nodes)
    if arguments.record is not None:
        arguments.record.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))


def summarize(outcome: NodeOutcome, *, seed: int, num_nodes: int) -> dict[str, object]:
    """Return what the benchmark reports of one run."""
    return {
        "bench": "chaos_nodes",
        "hardware": hardware(),
        "seed": seed,
        "nodes": num_nodes,
        "faults": len(outcome.endured),
        "faults_by_kind": dict(sorted(outcome.kinds.items())),
        "steps": outcome.report.last_step,
        "steps_done_again": outcome.report.voided_steps,
        "starts_of_all_nodes": sum(item.starts for item in outcome.endured),
        "groups": outcome.report.groups.state.dispatched,
        "statements_proven": outcome.report.ledger.checks,
        "seconds": round(outcome.seconds, 1),
        "endured": [
            {"kind": item.kind, "node": item.node, "seconds": round(item.seconds, 1), "starts": item.starts}
            for item in outcome.endured
        ],
    }


if __name__ == "__main__":
    main()
