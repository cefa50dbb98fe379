"""How much of a core does the orchestrator need to run groups on the environment workers of other nodes?

The product's two ends of the encrypted connection over loopback: `NodePools` here, and a `PoolServer` in a process for each of two
nodes. The pool behind it is a stand-in, which answers each group after half a second. The groups have the size of those of a run
with short answers: 4 rollouts of 300 tokens. They are dispatched at an even rate.

    uv run python scripts/bench/env_nodes.py [--rate 2000] [--seconds 20] [--rounds 3]

`user_cores` is the processor time in user mode that this process took for a group (getrusage), times the groups of a second at
`--rate` rollouts; `system_cores` is the same of the kernel, which does the sending and receiving. Medians over rounds, so that a
busy machine, which reaches a lower rate, still gives a number. The limit is 0.15 core. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import multiprocessing
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import zmq
from receiving import SECRET, free_port
from training import hardware

from trivet.config.schema.environment import EnvNodesConfig
from trivet.environments.nodes.node_pools import NodePools, open_node_pools
from trivet.environments.nodes.pool_server import PoolServer
from trivet.process.lifetime import die_with_parent
from trivet.wire.events import Event
from trivet.wire.groups import EnvironmentInfo, Example, GroupRequest, SamplingArguments, Split
from trivet.wire.rollouts import Rollout, Sample
from trivet.wire.status import WorkerStatus
from trivet.wire.versions import GroupId, PolicyVersion, VersionRun

NUM_NODES, NUM_ROLLOUTS, NUM_TOKENS, NUM_PROMPT = 2, 4, 300, 60
LIMIT = 0.15
_ANSWER_AFTER_S = 0.5
_TICK_S = 0.01
"""Pause between two dispatches of the groups that are due."""


class StandInPool:
    """Answers each group after `_ANSWER_AFTER_S`."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        mask_T = np.arange(NUM_TOKENS) >= NUM_PROMPT
        self._sample = Sample(
            token_ids_T=rng.integers(0, 50_000, NUM_TOKENS, dtype=np.int32),
            loss_mask_T=mask_T,
            logprobs_T=np.where(mask_T, -rng.random(NUM_TOKENS), 0.0).astype(np.float32),
            versions=[VersionRun(PolicyVersion(1), NUM_TOKENS - NUM_PROMPT)],
            temperature=1.0,
        )
        self.infos = {"toy": EnvironmentInfo(num_examples=1000)}

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Return rollouts of random tokens."""
        await asyncio.sleep(_ANSWER_AFTER_S)
        return [Rollout(index=index, reward=0.5, samples=[self._sample]) for index in range(request.num_rollouts)]

    async def example(self, env: str, *, split: Split, example_id: int) -> Example:
        """Return an example without messages."""
        return Example(prompt=[])

    async def run(self) -> None:
        """Do nothing until cancelled."""
        await asyncio.Event().wait()

    def status(self) -> Sequence[WorkerStatus]:
        """Return the state of eight workers."""
        return [WorkerStatus(env="toy", pid=pid) for pid in range(8)]

    def metrics(self) -> Mapping[str, float]:
        """Return as many metrics as eight workers have."""
        return {f"worker/toy-{number}/{name}": 1.0 for number in range(8) for name in ("pending", "restarts", "mean", "max")}

    def report_to(self, write_event: Callable[[Event], None]) -> None:
        """Report nothing."""

    async def aclose(self) -> None:
        """Do nothing."""


def serve(config: EnvNodesConfig) -> None:
    """Be a node, in another process."""
    die_with_parent()

    async def run() -> None:
        await PoolServer(StandInPool(), config, secret=SECRET, read_config=lambda: config).run()

    asyncio.run(run())


async def dispatch(pool: NodePools, *, rate: float, seconds: float, first: int) -> tuple[int, float, float, float]:
    """Run groups for a while; return their number, the seconds that it took, and processor seconds of user and kernel."""
    sampling, groups = SamplingArguments(temperature=1.0, seed=7), set[asyncio.Task[list[Rollout]]]()
    begun, before, started = 0, resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    while (elapsed := time.monotonic() - started) < seconds:
        while begun < elapsed * rate / NUM_ROLLOUTS:
            request = GroupRequest(
                group_id=GroupId(first + begun),
                env="toy",
                example_id=begun % 1000,
                num_rollouts=NUM_ROLLOUTS,
                base_url="http://10.0.0.1:8000/v1",
                sampling=sampling,
            )
            groups.add(task := asyncio.create_task(pool.run_group(request)))
            task.add_done_callback(groups.discard)
            begun += 1
        await asyncio.sleep(_TICK_S)
    await asyncio.gather(*groups)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return begun, elapsed, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the result."""
    config = EnvNodesConfig(own=0, num_required=NUM_NODES, max_nodes=NUM_NODES, host="127.0.0.1", port=free_port())
    spawning = multiprocessing.get_context("spawn")
    nodes = [
        spawning.Process(target=serve, args=(config.model_copy(update={"own": number}),), daemon=True)
        for number in range(NUM_NODES)
    ]
    for node in nodes:
        node.start()
    user, system, reached = list[float](), list[float](), list[float]()
    async with open_node_pools(config, secret=SECRET, timeout_s=120) as pool:
        keeping = asyncio.create_task(pool.run())
        first, *_ = await dispatch(pool, rate=args.rate, seconds=2.0, first=0)  # warms up
        for _ in range(args.rounds):
            count, seconds, user_s, system_s = await dispatch(pool, rate=args.rate, seconds=args.seconds, first=first)
            first += count
            groups_per_s = args.rate / NUM_ROLLOUTS
            user.append(user_s / count * groups_per_s)
            system.append(system_s / count * groups_per_s)
            reached.append(count * NUM_ROLLOUTS / seconds)
            print(f"user {user[-1]:.3f}, system {system[-1]:.3f} core at {reached[-1]:.0f} rollouts/s", flush=True)
        keeping.cancel()
    for node in nodes:
        node.terminate()
        node.join()
    return {
        "bench": "env_nodes",
        "user_cores": round(statistics.median(user), 3),
        "limit": LIMIT,
        "system_cores": round(statistics.median(system), 3),
        "user_us_per_group": round(statistics.median(user) / args.rate * NUM_ROLLOUTS * 1e6, 1),
        "user_cores_rounds": [round(each, 3) for each in user],
        "reached_rollouts_per_s": [round(each) for each in reached],
        "config": {**vars(args), "nodes": NUM_NODES, "rollouts_per_group": NUM_ROLLOUTS, "tokens": NUM_TOKENS},
        "hardware": hardware(),
        "python": platform.python_version(),
        "zmq": zmq.zmq_version(),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=2000.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
