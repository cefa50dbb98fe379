"""Does asynchrony pay? How long a step takes when generating and training each take a known time.

The product's dispatcher, buffer, loop and sender, real ZeroMQ, real clocks. The environment takes `--generate` seconds for every
group of a batch, all at once, as a server with room does; the trainer is a process that takes `--train` seconds for a batch and
then says that its policy is there. Strictly one after the other a step takes the sum (`max_async_level = 0`), overlapped the
longer of the two (`max_async_level = 1`): that is the floor.

    uv run python scripts/bench/overlap.py [--generate 1.0] [--train 0.8] [--steps 8]

The last line is one JSON object: medians of the steps in seconds, and over their floors.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from instant_server import dispatcher_of
from orchestrator import EXAMPLES, POLICIES, make_loop
from receiving import SECRET, free_port

from trivet.config.layout import RunLayout
from trivet.config.sections.orchestrator import OrchestratorConfig
from trivet.config.sections.shared import TransportConfig
from trivet.orchestrator.loop import Loop
from trivet.orchestrator.sampler import Draw
from trivet.process.lifetime import die_with_parent
from trivet.telemetry.telemetry import Telemetry
from trivet.transport.zeromq import ZmqReceiver, ZmqSender
from trivet.wire.rollouts import Rollout, Sample
from trivet.wire.versions import PolicyVersion, Step, VersionRun

GROUP_SIZE = 8
BATCH_SIZE = 64


def train(config: TransportConfig, num_steps: int, seconds: float, published: Connection) -> None:
    """Receive, compute for a while and publish, as the trainer does."""
    die_with_parent()
    receiver = ZmqReceiver(config, secret=SECRET, run_id=OrchestratorConfig().run.id)
    published.send(0)
    for step in range(1, num_steps + 1):
        receiver.receive(Step(step))
        time.sleep(seconds)
        published.send(step)
    published.poll(30)  # a receiver that closes at once may take the last acknowledgement with it
    receiver.close()


async def follow(published: Connection, loop: Loop) -> None:
    """Serve what the trainer publishes at once. Stands in for the policy watcher."""
    while True:
        if not published.poll():
            await asyncio.sleep(0.005)
            continue
        dispatcher = dispatcher_of(loop)
        dispatcher.version = POLICIES.version = PolicyVersion(published.recv())
        dispatcher.changed.notify()


def step_seconds(level: int, *, generate_s: float, train_s: float, num_steps: int, directory: Path) -> float:
    """Median of the steps, the first two and the last left out: there one side has nothing to do yet, or any more."""
    config = OrchestratorConfig(
        output_dir=directory,
        max_steps=num_steps,
        batch_size=BATCH_SIZE,
        rollouts_per_example=GROUP_SIZE,
        max_async_level=level,
        rollout_transport=TransportConfig(port=free_port()),
        shown_samples=None,
    )

    async def run_group(draw: Draw, *, base_url: str) -> list[Rollout]:
        version = POLICIES.version
        await asyncio.sleep(generate_s)
        return [make_rollout(index, version) for index in range(GROUP_SIZE)]

    times: list[float] = []

    async def measure(published: Connection) -> None:
        telemetry = Telemetry("orchestrator", layout=RunLayout(directory), run=config.run)
        sender = ZmqSender(config.rollout_transport, secret=SECRET, run_id=config.run.id)
        try:
            loop = make_loop(config, run_group, sender, telemetry, EXAMPLES)
            loop.gauges = lambda: times.append(time.perf_counter()) or {}
            loop.background_tasks = {"policies": lambda: follow(published, loop)}
            await loop.run()
        finally:
            await sender.aclose()
            telemetry.close()

    here, there = multiprocessing.Pipe()
    trainer = multiprocessing.get_context("spawn").Process(
        target=train, args=(config.rollout_transport, num_steps, train_s, there)
    )
    trainer.start()
    try:
        if not here.poll(120):
            raise TimeoutError("the trainer was not ready after 120 s")
        here.recv()
        asyncio.run(measure(here))
        here.send(True)
        trainer.join(60)
    finally:
        if trainer.is_alive():
            trainer.terminate()
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return statistics.median(steps[1:-1])


def make_rollout(index: int, version: PolicyVersion) -> Rollout:
    sample = Sample(
        token_ids_T=np.arange(32, dtype=np.int32),
        loss_mask_T=np.arange(32) >= 16,
        logprobs_T=np.full(32, -0.5, dtype=np.float32),
        versions=[VersionRun(version, 16)],
        temperature=1.0,
    )
    return Rollout(index=index, reward=float(index % 2), samples=[sample])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generate", type=float, default=1.0)
    parser.add_argument("--train", type=float, default=0.8)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for level in (0, 1):
            found[f"step_s_level_{level}"] = step_seconds(
                level, generate_s=args.generate, train_s=args.train, num_steps=args.steps, directory=Path(name) / str(level)
            )
    result = {
        "bench": "overlap",
        **{key: round(value, 3) for key, value in found.items()},
        "over_the_sum_level_0": round(found["step_s_level_0"] / (args.generate + args.train), 3),
        "over_the_longer_level_1": round(found["step_s_level_1"] / max(args.generate, args.train), 3),
        "config": vars(args),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
