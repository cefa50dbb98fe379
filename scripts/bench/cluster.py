"""Which share of its time does a run over 157 nodes train when nodes are lost, and does one orchestrator carry 1,000 servers?

In virtual time, with the product's own supervisor, recovery, plan over nodes, node registry, agents and orchestrator
(tests/support/simulated_cluster.py, simulated_run.py). Machines, processes and the time that they take are stand-ins: the constants
below. 1,000 servers of one GPU on 125 nodes, 256 ranks on 32. The same losses meet three strategies: recovery by role, as the
product has it, the same with attempts that wait for the lost node, and every loss restarting everything.

    uv run python scripts/bench/cluster.py [PART...] [--hours 12] [--record docs/benchmarks/cluster.json]

`ettr` is the time in steps that no attempt took back, over all time. `limit` is what is left of it when a loss costs the start of
processes and the steps since the commit alone: noticed at once, with a node at hand. Each row of a PART is kept in --record when it
is over. The last line is one JSON object; `plot.py` draws it.
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.simulated_cluster import SimulatedCluster  # noqa: E402  # the tests' stand-ins
from support.simulated_run import Plan, SimulatedRun, SimulatedServer, publish_policies  # noqa: E402
from support.simulated_training import ClusterPlan  # noqa: E402
from support.virtual_time import run_virtually  # noqa: E402
from trivet.client.inference_client import PolicyStatus  # noqa: E402
from trivet.client.server import TargetPolicy  # noqa: E402
from trivet.client.server_pool import ServerPool  # noqa: E402
from trivet.config.layout import RunLayout  # noqa: E402
from trivet.config.sections.client import ClientConfig, ElasticConfig  # noqa: E402
from trivet.orchestrator.dispatcher import Dispatcher  # noqa: E402
from trivet.weights.manifest import read_manifest  # noqa: E402
from trivet.wire.events import Dispatch, Finish, ServerDown, ServerUp, Train  # noqa: E402
from trivet.wire.versions import PolicyVersion  # noqa: E402

NUM_SERVERS, SERVERS_PER_NODE, GPUS_PER_NODE = 1000, 8, 8
NUM_TRAIN_NODES = 256 // GPUS_PER_NODE
NUM_NODES = NUM_TRAIN_NODES + NUM_SERVERS // SERVERS_PER_NODE
MIN_TRAIN_NODES = 28
"""Where the plan allows it, an attempt goes on without up to four nodes."""

TRAIN_S = 60.0
"""A step on all nodes: reports of large runs speak of one to several minutes."""
BATCH_S = 54.0
"""All servers together have a tenth in reserve, so that the trainer waits for no batch."""
COMMIT_EVERY, COMMIT_S = 2, 10.0
"""Young's interval, sqrt(2 * cost * time between losses), for 2 s that a commit costs and a trainer node lost every 50 minutes:
140 s (J. W. Young, A first order approximation to the optimum checkpoint interval, 1974). It is written beside the next step."""
TRAINER_START_S = 90.0
"""Imports from a shared file system, 256 ranks that meet, and a checkpoint that is read."""
SERVER_START_S = 180.0
"""vLLM: imports, 14 GB and more to load, graphs to capture."""
ORCHESTRATOR_START_S = 30.0
"""Imports and environments 20 s, and the policy on all servers (`time_to_dispatch`)."""
LOAD_S = 10.0
"""A server loads a policy of 14 GB at 1.4 GB/s."""
TERM_S = 5.0
"""From SIGTERM to the end."""
LOST_AFTER_S = 30.0
"""Default of `deployment.lost_after_s`: a node that was silent for so long is lost."""
RETURN_S = 90.0
"""A spare node runs the command that long after a node was lost: the scheduler has to notice it too."""
REQUEUE_S = 150.0
"""A job that was queued again: SLURM waits two minutes (docs/slurm.md)."""

STRATEGIES = ("by role", "by role, waits for the node", "restart all")
TEN_MINUTES = 6.0
ONE_PERCENT = 0.01 * NUM_NODES
LOSSES: dict[str, tuple[float, int]] = {
    "1 % of nodes an hour": (ONE_PERCENT, NUM_NODES),
    "a node every ten minutes": (TEN_MINUTES, NUM_NODES),
    "a node that trains every ten minutes": (TEN_MINUTES, NUM_TRAIN_NODES),
}
"""Losses an hour, and how many nodes, counted from the head, they may hit."""
SEED = 18
_GOLDEN = (5**0.5 - 1) / 2


def draw_losses(losses: str, *, hours: float) -> list[tuple[float, int]]:
    """Return the times and nodes of the losses, the same for every strategy.

    Times are random. Nodes follow multiples of the golden ratio, which spread evenly: each kind is hit as often as it is there.
    """
    per_hour, num_nodes = LOSSES[losses]
    rng, at, drawn = random.Random(SEED), 0.0, list[tuple[float, int]]()
    while (at := at + rng.expovariate(per_hour / 3600)) < hours * 3600:
        drawn.append((at, int((len(drawn) + 1) * _GOLDEN % 1 * num_nodes)))
    return drawn


def cluster_plan(losses: list[tuple[float, int]], *, strategy: str, hours: float) -> ClusterPlan:
    """Return the cluster of this benchmark."""
    return ClusterPlan(
        num_train_nodes=NUM_TRAIN_NODES,
        num_servers=NUM_SERVERS,
        servers_per_node=SERVERS_PER_NODE,
        gpus_per_node=GPUS_PER_NODE,
        losses=losses,
        end_s=hours * 3600,
        min_train_nodes=MIN_TRAIN_NODES if strategy == "by role" else None,
        restarts_all=strategy == "restart all",
        return_s=RETURN_S,
        requeue_s=REQUEUE_S,
        server_start_s=SERVER_START_S,
        trainer_start_s=TRAINER_START_S,
        orchestrator_start_s=ORCHESTRATOR_START_S,
        term_s=TERM_S,
        batch_s=BATCH_S,
        train_s=TRAIN_S,
        commit_every=COMMIT_EVERY,
        commit_s=COMMIT_S,
    )


def limit_of(losses: list[tuple[float, int]], *, strategy: str, hours: float) -> float:
    """Return the share of time that trains when each loss costs the start of what it stops and the steps since the commit alone."""
    everything_s = max(TRAINER_START_S, SERVER_START_S + BATCH_S)
    trainer_s = max(TRAINER_START_S, ORCHESTRATOR_START_S + BATCH_S)
    back_s = COMMIT_EVERY * TRAIN_S / 2 + COMMIT_S
    lost_s = everything_s  # the first start
    for _, node in losses:
        if strategy == "restart all" or node == 0:
            lost_s += everything_s + back_s
        elif node < NUM_TRAIN_NODES:
            lost_s += trainer_s + back_s
    return max(0.0, 1 - lost_s / (hours * 3600))


def simulate(losses: str, *, strategy: str, hours: float) -> dict[str, Any]:
    """Return what a run under these losses achieves."""
    drawn = draw_losses(losses, hours=hours)
    with tempfile.TemporaryDirectory() as directory:
        cluster = SimulatedCluster(
            cluster_plan(drawn, strategy=strategy, hours=hours), layout=RunLayout(Path(directory) / "run")
        )
        cluster.run()
    training, wall_s = cluster.training, cluster.timeline.now
    rounds_ms = np.array(cluster.head_rounds_s) * 1e3
    hits = [node for _, node in drawn]
    return {
        "losses": losses,
        "strategy": strategy,
        "ettr": round(training.kept_s / wall_s, 4),
        "limit": round(limit_of(drawn, strategy=strategy, hours=hours), 4),
        "work": round(training.step * TRAIN_S / wall_s, 4),
        "steps": training.step,
        "hours": hours,
        "nodes_lost": {
            "head": hits.count(0),
            "trainer": sum(0 < node < NUM_TRAIN_NODES for node in hits),
            "server": sum(node >= NUM_TRAIN_NODES for node in hits),
        },
        "time_shares": {name: round(seconds / wall_s, 4) for name, seconds in sorted(training.spent_s.items())},
        "job_ended": {"head lost": cluster.ends.head_lost} | {str(code): num for code, num in cluster.ends.codes.items()},
        "why": sorted({reason.split(": ", 1)[1] for reason in cluster.ends.reasons}),
        "head_round_ms": {
            "median": round(float(np.median(rounds_ms)), 1),
            "p99": round(float(np.percentile(rounds_ms, 99)), 1),
        },
        "plan_ms": round(statistics.median(cluster.plans_s) * 1e3, 1),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A node with its servers, silent from one moment until another has taken its place, whose servers then start."""

    at: float
    servers: tuple[int, ...]


class ManyServers(SimulatedRun):
    """The orchestrator with servers that are lost in nodes."""

    losses: tuple[Loss, ...] = ()

    def _troubles(self) -> Iterator[Any]:
        return (self._lose(loss) for loss in self.losses)

    async def _lose(self, loss: Loss) -> None:
        """Lose the servers of a node. The launcher names them no more until they have started on another one."""
        lost = [list(self.servers.values())[number] for number in loss.servers]
        remaining = [url for url, server in self.servers.items() if server not in lost]
        await asyncio.sleep(loss.at)
        for server in lost:
            server.is_frozen = True
        await asyncio.sleep(LOST_AFTER_S)
        self.name_servers(remaining)
        await asyncio.sleep(RETURN_S - LOST_AFTER_S)
        for server in lost:
            server.is_frozen = False
        await asyncio.gather(*(server.crash(SERVER_START_S) for server in lost))
        self.name_servers(self.servers)


@contextmanager
def timed_dispatches(seconds: list[float]) -> Iterator[None]:
    """Measure the CPU time in which the dispatcher starts each group: server, draw, event, task."""
    start_next = Dispatcher._start_next  # pyright: ignore[reportPrivateUsage]

    def timed(self: Dispatcher, tasks: asyncio.TaskGroup) -> bool:
        begun = time.thread_time()
        has_started = start_next(self, tasks)
        if has_started:
            seconds.append(time.thread_time() - begun)
        return has_started

    Dispatcher._start_next = timed  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        Dispatcher._start_next = start_next  # pyright: ignore[reportPrivateUsage]


def orchestrate(*, num_servers: int, num_steps: int, num_losses: int) -> dict[str, Any]:
    """Return the rollouts that the orchestrator has trained a second, and what its work costs."""
    group, groups = 8, num_servers
    plan = Plan(
        seed=SEED,
        num_servers=num_servers,
        max_steps=num_steps,
        batch_size=group * groups,
        rollouts_per_example=group,
        oversampling_factor=2.0,
        max_async_level=2,  # a group takes nearly two steps
        train_s=TRAIN_S,
        is_even=True,
        load_s=LOAD_S,
        # Groups that all took the same time would come in waves, and a lost one would cost the rest of its wave.
        do_groups_vary=True,
        group_s=2 * BATCH_S / 1.1,
        are_servers_named=True,
    )
    losses = tuple(
        Loss(at=(number + 0.5) * 600.0, servers=tuple(range(number * SERVERS_PER_NODE, (number + 1) * SERVERS_PER_NODE)))
        for number in range(num_losses)
    )
    dispatches_s: list[float] = []

    async def play(directory: Path) -> ManyServers:
        run = ManyServers(plan, directory=directory / "run", published=publish_policies(directory / "all", count=num_steps))
        run.losses = losses
        await run.run()
        return run

    with tempfile.TemporaryDirectory() as name, timed_dispatches(dispatches_s):
        begun = time.process_time()
        run = run_virtually(play(Path(name)), limit_s=24 * 3600)
        cpu_s = time.process_time() - begun
    trained = [event.time for event in run.events if isinstance(event, Train)]
    finished = sum(isinstance(event, Finish) for event in run.events)
    downs = [event.time for event in run.events if isinstance(event, ServerDown)]
    ups = [event.time for event in run.events if isinstance(event, ServerUp) and event.time > 60.0]
    return {
        "servers": num_servers,
        "nodes_lost": num_losses,
        "rollouts_per_s": round(group * groups * (len(trained) - 2) / (trained[-1] - trained[1]), 1),
        "limit": round(group * groups / TRAIN_S, 1),
        "dispatch_us": {
            "median": round(float(np.median(dispatches_s)) * 1e6, 1),
            "p99": round(float(np.percentile(dispatches_s, 99)) * 1e6, 1),
        },
        "cpu_us_per_rollout": round(cpu_s / (finished * group) * 1e6, 1),
        "cores": round(cpu_s / trained[-1], 4),
        "dispatched_again": sum(isinstance(event, Dispatch) for event in run.events) - finished - run.loop.buffer.num_in_flight,
        "noticed_after_s": round(downs[0] - losses[0].at, 1) if downs and losses else None,
        "serves_again_after_s": round(ups[0] - losses[0].at, 1) if ups and losses else None,
    }


def time_to_dispatch(*, num_servers: int, num_silent: int) -> float:
    """Return the seconds from an orchestrator's start after a rollback until servers take rollouts, some nodes being silent."""

    async def start(directory: Path) -> float:
        target = RunLayout(publish_policies(directory, count=1)).weights_step(1)
        digest = read_manifest(target).digest
        urls = [f"http://server-{number}" for number in range(num_servers)]
        servers = {url: SimulatedServer(url, random.Random(SEED), load_s=LOAD_S) for url in urls}
        for server in servers.values():
            server.status = PolicyStatus(version=PolicyVersion(2), digest="taken back")
        for url in urls[:num_silent]:
            servers[url].is_frozen = True
        file = directory / "servers"
        file.write_text("\n".join(urls))
        clock = asyncio.get_running_loop().time
        pool = ServerPool(
            ClientConfig(base_url=urls, elastic=ElasticConfig(servers_file=file)),
            make_client=lambda url: servers[url],  # type: ignore[arg-type, return-value]  # acts as one
            write_event=lambda _: None,
            clock=clock,
        )
        await pool.start()
        await pool.ensure_policy_on_all(TargetPolicy(version=PolicyVersion(1), digest=digest, directory=target))
        assert pool.pick(num_rollouts=8) is not None
        return clock()

    with tempfile.TemporaryDirectory() as name:
        return round(run_virtually(start(Path(name)), limit_s=24 * 3600), 1)


PARTS = ("ettr", "orchestrator", "start")


def measure(part: str, *, hours: float) -> Iterator[tuple[str, Any]]:
    """Yield the name and the figures of each row of a part."""
    if part == "start":
        yield "none silent", time_to_dispatch(num_servers=NUM_SERVERS, num_silent=0)
        yield "a node silent", time_to_dispatch(num_servers=NUM_SERVERS, num_silent=SERVERS_PER_NODE)
    elif part == "orchestrator":
        yield "none lost", orchestrate(num_servers=NUM_SERVERS, num_steps=10, num_losses=0)
        yield "a node every ten minutes", orchestrate(num_servers=NUM_SERVERS, num_steps=20, num_losses=2)
    else:
        for losses in LOSSES:
            for strategy in STRATEGIES:
                yield f"{losses}, {strategy}", simulate(losses, strategy=strategy, hours=hours)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--hours", type=float, default=12.0, help="simulated time of each row of ettr")
    parser.add_argument("--record", type=Path, default=Path("docs/benchmarks/cluster.json"))
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    record: dict[str, Any] = json.loads(args.record.read_text()) if args.record.exists() else {"benchmark": "cluster"}
    record["assumptions"] = {name.lower(): value for name, value in globals().items() if name.endswith("_S")}
    record["assumptions"] |= {"commit_every": COMMIT_EVERY, "min_train_nodes": MIN_TRAIN_NODES, "nodes": NUM_NODES}
    for part in args.parts or PARTS:
        rows: dict[str, Any] = record.setdefault(part, {})
        for name, found in measure(part, hours=args.hours):
            rows[name] = found
            print(part, name, json.dumps(found), flush=True)
            args.record.write_text(json.dumps(record) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
