"""How many rollouts a second can the orchestrator itself carry, and does its event loop stay free meanwhile?

The product's dispatcher, buffer, loop and sender, real ZeroMQ to a process that acknowledges and throws away. First with an
environment that costs nothing: each group is answered after about a second, so that rollouts in flight really are, and
turned into samples. Then through a verifiers SingleTurnEnv whose server answers at once inside this process, next to verifiers'
own `generate` over as many rollouts with the same client: the ceiling of any orchestrator around it. Then the same environment in a
worker process, as a run has it: `through_worker` has this process's CPU time, and how much more that is than with the costless
environment in the same shape, which makes its samples here: what the channel costs. Last, a shorter run with a stop watch around
each part, CPU time of its thread.

    uv run python scripts/bench/orchestrator.py [--rollouts 200000] [--in-flight 10000] [--tokens 64]
"""

import argparse
import asyncio
import json
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import instant_server
import numpy as np
import psutil
from instant_server import NUM_EXAMPLES, POLICIES, OneServer, dispatcher_of, instant_client, make_environment
from receiving import SECRET, draining, free_port

import trivet.orchestrator.dispatcher as dispatcher_module
import trivet.orchestrator.loop as loop_module
import trivet.transport.zeromq as zeromq_module
from trivet.algorithms.advantages import mean_baseline
from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EnvConfig, EnvWorkersConfig, SamplingConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.shared import CkptConfig, TransportConfig
from trivet.environments.apis.turns import Turn, request_arguments, to_samples
from trivet.environments.apis.v0.play import V0Host
from trivet.environments.workers.pool import open_worker_pool
from trivet.orchestrator.buffer import GroupBuffer
from trivet.orchestrator.checkpoint import RunTotals
from trivet.orchestrator.dispatcher import ChangeEvent, Dispatcher, RunDrawnGroup, group_runner
from trivet.orchestrator.loop import Loop
from trivet.orchestrator.policy import PolicyWatcher
from trivet.orchestrator.sampler import Draw, ExampleSampler
from trivet.telemetry.telemetry import Telemetry
from trivet.transport.zeromq import ZmqSender
from trivet.wire.groups import SamplingArguments, ServerAccess
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import PolicyVersion, Step, VersionRun
from trivet.wire.workers import HostSettings

GROUP_SIZE = 8
LATENCY_S = 1.0
"""Mean time of a group in the environment that costs nothing. It varies, because no server ends all groups at one moment."""
OVERSAMPLING = 5.0


@dataclass(slots=True)
class Watched:
    """The measurements of one run of the loop."""

    lags_s: "array[float]" = field(default_factory=lambda: array("d"))
    """A number for every 5 ms: a list would be most of the memory that grows."""
    in_flight: list[int] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    """CPU time of this process, without the receiver."""
    whole_rate: float = 0.0
    """Trained rollouts per second from the start to the last batch, without those in flight then."""

    async def run(self, dispatcher: Dispatcher) -> None:
        process = psutil.Process()
        next_look = 0.0
        while True:
            due = time.perf_counter() + 0.005
            await asyncio.sleep(0.005)
            self.lags_s.append(max(0.0, time.perf_counter() - due))
            if due > next_look:
                next_look = due + 1.0
                self.in_flight.append(dispatcher.rollouts_in_flight)
                self.rss_mib.append(process.memory_info().rss / 2**20)


def costless(num_tokens: int) -> RunDrawnGroup:
    """Return an environment that costs only what every environment costs: its turns become samples."""
    half = num_tokens // 2
    prompt, completion, logprobs = list(range(half)), list(range(half, num_tokens)), [-0.5] * (num_tokens - half)

    turn = asyncio.Lock()

    async def run(draw: Draw, base_url: str) -> list[Rollout]:
        version = POLICIES.version
        await asyncio.sleep(LATENCY_S * random.uniform(0.5, 1.5))
        async with turn:  # in a run this is the work of environment processes; here it must not pile up on the loop
            rollouts = [make_rollout(index, version) for index in range(GROUP_SIZE)]
            await asyncio.sleep(0)
        return rollouts

    def make_rollout(index: int, version: PolicyVersion) -> Rollout:
        answered = Turn(
            prompt_ids=prompt,
            completion_ids=completion,
            logprobs=logprobs,
            versions=[VersionRun(version, len(completion))],
        )
        samples, _ = to_samples([answered], temperature=1.0, strategy="interleaved")
        return Rollout(index=index, reward=float(index % 2), samples=samples, scores={"reward": index % 2})

    return run


def run_loop(
    opening: AbstractAsyncContextManager[RunDrawnGroup],
    directory: Path,
    *,
    num_rollouts: int,
    in_flight: int,
    examples: list[str],
    publishes: bool = True,
) -> tuple[float, Watched]:
    """Return rollouts per second from the second batch on, and what was measured meanwhile.

    Args:
        publishes: each step has a new policy, which only environments inside this process can answer with.
    """
    batch_size = int(in_flight / OVERSAMPLING) // GROUP_SIZE * GROUP_SIZE
    num_steps = max(3, num_rollouts // batch_size)
    config = OrchestratorConfig(
        output_dir=directory,
        max_steps=num_steps,
        batch_size=batch_size,
        rollouts_per_example=GROUP_SIZE,
        oversampling_factor=OVERSAMPLING,
        max_async_level=1 if publishes else num_steps,
        max_off_policy_steps=num_steps,
        rollout_transport=TransportConfig(port=free_port()),
        ckpt=CkptConfig(),
        shown_samples=None,
    )
    times: list[float] = []
    watched = Watched()

    def on_step(loop: Loop) -> dict[str, float]:
        times.append(time.perf_counter())
        if not publishes:
            return {}
        dispatcher = dispatcher_of(loop)
        dispatcher.version = POLICIES.version = PolicyVersion(loop.progress.step)
        dispatcher.changed.notify()
        return {}

    async def measure() -> None:
        telemetry = Telemetry("orchestrator", config)
        sender = ZmqSender(config.rollout_transport, secret=SECRET, run=config.run)
        try:
            async with opening as run_group:
                loop = make_loop(config, run_group, sender, telemetry, examples)
                loop.gauges = lambda: on_step(loop)
                loop.background_tasks = {"watched": lambda: watched.run(dispatcher_of(loop))}
                started, started_cpu_s = time.perf_counter(), time.process_time()
                await loop.run()
                watched.cpu_s = time.process_time() - started_cpu_s
                watched.whole_rate = batch_size * len(times) / (times[-1] - started)
        finally:
            await sender.aclose()
            telemetry.close()

    with draining(config.rollout_transport, num_steps):
        asyncio.run(measure())
    return batch_size * (len(times) - 1) / (times[-1] - times[0]), watched


def make_loop(
    config: OrchestratorConfig, run_group: RunDrawnGroup, sender: ZmqSender, telemetry: Telemetry, examples: list[str]
) -> Loop:
    """Put a loop together as the orchestrator does."""
    fill_changed = ChangeEvent()
    buffer = GroupBuffer(
        write_event=telemetry.write_event,
        online_difficulty_filtering=False,
        max_off_policy_steps=config.max_off_policy_steps,
    )
    sampler = ExampleSampler({"toy": examples}, seed=1)
    dispatcher = Dispatcher(
        config,
        sampler=sampler,
        buffer=buffer,
        run_group=run_group,
        servers=OneServer(),  # type: ignore[arg-type]  # acts as a ServerPool
        advantage=mean_baseline,
        on_group_end=fill_changed.notify,
    )
    POLICIES.version, POLICIES.step = PolicyVersion(0), Step(1)
    watcher: PolicyWatcher = POLICIES  # type: ignore[assignment]  # acts as one
    return Loop(
        config=config,
        layout=RunLayout(config.output_dir),
        progress=RunTotals(),
        sampler=sampler,
        buffer=buffer,
        dispatcher=dispatcher,
        watcher=watcher,
        sender=sender,
        telemetry=telemetry,
        fill_changed=fill_changed,
    )


ARGUMENTS = SamplingArguments(temperature=1.0, fields={"max_tokens": 64})
RUNNER_CONFIG = OrchestratorConfig(
    env=[EnvConfig(id="toy")], rollouts_per_example=GROUP_SIZE, sampling=SamplingConfig(temperature=1.0, max_tokens=64)
)


def rate_of_verifiers(num_rollouts: int, num_tokens: int) -> float:
    """Return rollouts per second of verifiers' own loop."""
    env = make_environment()
    examples: list[Any] = list(env.get_dataset())
    rows = [examples[index // GROUP_SIZE % NUM_EXAMPLES] for index in range(num_rollouts)]

    async def generate() -> float:
        client = instant_client(num_tokens)
        started = time.perf_counter()
        await env.generate(rows, client, "m", request_arguments(ARGUMENTS, seed=None), state_columns=["trajectory"])
        seconds = time.perf_counter() - started
        await client.close()
        return num_rollouts / seconds

    return asyncio.run(generate())


def rate_through_verifiers(num_rollouts: int, num_tokens: int, directory: Path) -> float:
    """Return rollouts per second of our loop through the same environment."""
    servers = ServerAccess(base_urls=[instant_server.ROOT], key_variables=["OPENAI_API_KEY"])
    settings = HostSettings(env_id="toy", name="toy", args={}, model_name="m", servers=servers)
    host = V0Host(make_environment(), settings, make_client=lambda _: instant_client(num_tokens))
    pool: Any = host  # which runs groups as a pool does
    run_group = group_runner(pool, RUNNER_CONFIG)
    _, watched = run_loop(
        nullcontext(run_group), directory, num_rollouts=num_rollouts, in_flight=num_rollouts // 10, examples=EXAMPLES
    )
    return watched.whole_rate


def through_worker(num_rollouts: int, num_tokens: int, directory: Path) -> dict[str, float]:
    """Return the rate through one worker process, and this process's CPU time with it and without it."""
    settings = HostSettings(
        env_id=f"{Path(instant_server.__file__)}:load_environment",
        name="toy",
        args={"num_tokens": num_tokens},
        model_name="m",
        servers=ServerAccess(base_urls=[instant_server.ROOT], key_variables=["OPENAI_API_KEY"]),
    )

    @asynccontextmanager
    async def open_pool() -> AsyncIterator[RunDrawnGroup]:
        async with open_worker_pool(
            [settings], log_of=lambda name: directory / "worker.log", limits=EnvWorkersConfig()
        ) as pool:
            yield group_runner(pool, RUNNER_CONFIG)

    shape = {"num_rollouts": num_rollouts, "in_flight": num_rollouts // 10, "examples": EXAMPLES, "publishes": False}
    _, with_worker = run_loop(open_pool(), directory / "with", **shape)
    _, without = run_loop(nullcontext(costless(num_tokens)), directory / "without", **shape)
    channel_us = (with_worker.cpu_s - without.cpu_s) / num_rollouts * 1e6
    return {
        "rollouts_per_s": round(with_worker.whole_rate, 1),
        "cpu_us_per_rollout": round(with_worker.cpu_s / num_rollouts * 1e6, 1),
        "channel_us_per_rollout": round(channel_us, 1),
        "channel_cores_at_2000_per_s": round(channel_us * 2000 / 1e6, 3),
    }


PARTS: list[tuple[str, object, str]] = [
    ("cut and advantages", dispatcher_module, "make_group"),
    ("buffer", GroupBuffer, "finished"),
    ("sampler", ExampleSampler, "take"),
    ("dispatch event", GroupBuffer, "dispatched"),
    ("batch forming", GroupBuffer, "take_batch"),
    ("packing", loop_module, "_make_batch"),
    ("encoding", zeromq_module, "make_message"),
    ("rollout files", loop_module, "write_rollouts"),
    ("metrics", loop_module, "batch_metrics"),
]


@contextmanager
def timed_parts(seconds: defaultdict[str, float]) -> Iterator[None]:
    """Measure the time in each part, in whatever thread it runs."""
    kept: list[tuple[object, str, Callable[..., Any]]] = []
    lock = threading.Lock()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                with lock:
                    seconds[name] += time.thread_time() - started

        return run

    for name, owner, attribute in PARTS:
        function = getattr(owner, attribute)
        kept.append((owner, attribute, function))
        setattr(owner, attribute, timed(name, function))
    try:
        yield
    finally:
        for owner, attribute, function in kept:
            setattr(owner, attribute, function)


def where_the_time_goes(run_group: RunDrawnGroup, directory: Path, *, in_flight: int) -> dict[str, float]:
    """Return the share of the process's CPU time by part."""
    seconds: defaultdict[str, float] = defaultdict(float)
    started = time.process_time()
    with timed_parts(seconds):
        run_loop(nullcontext(run_group), directory, num_rollouts=4 * in_flight, in_flight=in_flight, examples=EXAMPLES)
    total = time.process_time() - started
    shares = {name: round(value / total, 3) for name, value in sorted(seconds.items(), key=lambda item: -item[1])}
    return {**shares, "turns to samples, tasks, timers and the rest": round(1 - sum(shares.values()), 3)}


EXAMPLES = [f"hash-{index}" for index in range(NUM_EXAMPLES)]


def growth_mib(rss_mib: list[float]) -> float:
    """Resident memory at the end above that of the time after the start, medians over a tenth of the run each."""
    tenth = max(1, len(rss_mib) // 10)
    return statistics.median(rss_mib[-tenth:]) - statistics.median(rss_mib[2 * tenth : 3 * tenth])


def rss_by_tenth(rss_mib: list[float]) -> list[float]:
    """Return the median resident memory of each tenth of the run."""
    tenth = max(1, len(rss_mib) // 10)
    return [round(statistics.median(rss_mib[at * tenth : (at + 1) * tenth] or rss_mib[-1:]), 1) for at in range(10)]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200_000)
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--verifiers-rollouts", type=int, default=6_000, help="0: only the orchestrator alone")
    args = parser.parse_args()
    run_group = costless(args.tokens)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        rate, watched = run_loop(
            nullcontext(run_group), root / "core", num_rollouts=args.rollouts, in_flight=args.in_flight, examples=EXAMPLES
        )
        pairs: list[tuple[float, float]] = []
        for turn in range(3 if args.verifiers_rollouts else 0):
            theirs = rate_of_verifiers(args.verifiers_rollouts, args.tokens)
            pairs.append((rate_through_verifiers(args.verifiers_rollouts, args.tokens, root / f"verifiers-{turn}"), theirs))
        worker = through_worker(args.verifiers_rollouts, args.tokens, root / "worker") if args.verifiers_rollouts else None
        shares = where_the_time_goes(run_group, root / "parts", in_flight=args.in_flight)
    lags_ms = np.array(watched.lags_s[len(watched.lags_s) // 10 :]) * 1e3
    result = {
        "bench": "orchestrator",
        "rollouts_per_s": round(rate, 1),
        "ratio_to_verifiers": round(statistics.median(ours / theirs for ours, theirs in pairs), 3) if pairs else None,
        "loop_lag_p99_ms": round(float(np.percentile(lags_ms, 99)), 2),
        "loop_lag_p50_ms": round(float(np.percentile(lags_ms, 50)), 2),
        "loop_lag_max_ms": round(float(lags_ms.max()), 1),
        "cpu_us_per_rollout": round(watched.cpu_s / args.rollouts * 1e6, 1),
        "in_flight_median": statistics.median(watched.in_flight),
        "rss_mib": round(watched.rss_mib[-1], 1),
        "rss_growth_mib": round(growth_mib(watched.rss_mib), 1),
        "rss_mib_by_tenth": rss_by_tenth(watched.rss_mib),
        "through_verifiers_per_s": [round(ours, 1) for ours, _ in pairs],
        "verifiers_per_s": [round(theirs, 1) for _, theirs in pairs],
        "through_worker": worker,
        "time_shares": shares,
        "config": {key: str(value) for key, value in vars(args).items()},
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
