"""How long does a policy take from the trainer's memory to a server on another node, and for how long does the server pause?

The server's node is a network namespace at the end of a link with a token bucket (`limited_link.py`). With --serve an engine runs
there and answers streaming requests all the time; without, `weight_node.py` gets and verifies policies, which any size allows. In
each round the next policy differs in --share of its weights, and its parts are measured in turns:

- publish: from weights in memory to the published directory, `copy`: curl of its weight files over the link to the same disk, which
  is the floor of a transport of whole policies; `fetch`: until the node has every byte, verified;
- `pause`: the engine samples nothing, by the server's log; `gap`: no request gets a token, which includes the probe;
- `reload`: vLLM's own `reload_weights` of the same directory in the same engine, without pause, verification and probe: the floor;
- `served`: from the beginning of the publication until a token has the new version; `lost`: the rate of tokens times the pause.

With --transport files, nothing is fetched, and the directory is on this machine's disk: the link does not count.

    uv run python scripts/bench/weight_transports.py --model models/smollm2 --serve [--transport http] [--gbit 1 10]     as root
    uv run python scripts/bench/weight_transports.py --size 16 --transport http

Medians over the rounds after one warm-up, with ratios of each round. With --record the rows are put into that file, in place of
those of the same model, transport and rate. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch
from limited_link import Link, copy_plainly
from made_up_weights import Policies, load_policies, make_policies
from training import hardware

from trivet.algorithms.probe import Probe, ProbeSample
from trivet.client.inference_client import InferenceClient
from trivet.client.server import Server, TargetPolicy
from trivet.client.transfer_rounds import TransferRounds
from trivet.config.layout import RunLayout
from trivet.secret import RunSecret, make_secret
from trivet.trainer.weight_sender import WeightSender
from trivet.transfer.group import KEY_PURPOSE
from trivet.weights.manifest import offer_policy, read_manifest
from trivet.weights.publish import DeltaPublisher, publish
from trivet.wire.versions import FetchablePolicy, PolicyVersion, TransferRound

PROBE_TOKENS = 64
"""The default of weights.probe_tokens."""
TRANSFER_TIMEOUT_S = 120.0
"""Longest time for one exchange of a transfer in memory."""
RATE_WINDOW_S = 4.0
"""Seconds before each publication over which the rate of sampling is measured."""
_LOADED = re.compile(r"policy loaded version=(\d+) .*pause_s=([\d.]+)")
_FETCHED = re.compile(r"policy fetched version=(\d+) seconds=([\d.]+)")
ORIGIN_PORT, SERVER_PORT = 5556, 8094
_NEVER = 1 << 30
"""An interval of whole policies that no version reaches."""


@dataclass(slots=True)
class Load:
    """Streaming requests that a server answers all the time, and when their tokens arrived."""

    url: str
    num_requests: int
    arrivals: list[float] = field(default_factory=list)
    """Times of tokens, in seconds of `time.perf_counter`."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the requests running for a block."""
        async with httpx.AsyncClient(base_url=self.url, timeout=900, limits=httpx.Limits(max_connections=None)) as http:
            model = (await http.get("/v1/models")).json()["data"][0]["id"]
            tasks = [asyncio.create_task(self._ask(http, model, number)) for number in range(self.num_requests)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, http: httpx.AsyncClient, model: str, number: int) -> None:
        body = {"model": model, "prompt": [10 + number] * 8, "max_tokens": 3900, "ignore_eos": True, "stream": True}
        while True:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self.arrivals.append(time.perf_counter())

    def rate(self, since: float, until: float) -> float:
        """Return the tokens a second between two times."""
        return sum(since <= arrival < until for arrival in self.arrivals) / (until - since)

    def longest_gap(self, since: float, until: float) -> float:
        """Return the longest time without a token that ended between two times."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((after - before for before, after in pairs if since <= after < until), default=until - since)


@dataclass(slots=True, kw_only=True)
class Bench:
    """A run's directory and the policies that are published there."""

    layout: RunLayout
    secret: RunSecret
    policies: Policies
    link: Link
    transport: str
    share: float
    cache: Path
    version: int = 0
    probe: Probe | None = None
    deltas: DeltaPublisher | None = None
    node: subprocess.Popen[bytes] | None = None
    store_port: int = 0
    sender: WeightSender | None = None
    rounds: TransferRounds | None = None
    server: Server | None = None

    async def publish(self) -> dict[str, float]:
        """Change and publish the next policy; remove the one before the last."""
        self.version += 1
        self.policies.change(self.share)
        old = self.layout.weights_step(self.version - 2)
        if old.is_dir():
            shutil.rmtree(old)
        started = time.perf_counter()
        await asyncio.to_thread(
            publish,
            self.layout,
            version=PolicyVersion(self.version),
            run_id="bench",
            write=self.policies.write,
            probe=self.probe,
            deltas=self.deltas,
        )
        times = {"publish_s": time.perf_counter() - started}
        if self.deltas is not None and (figures := self.deltas.metrics):
            times["write_delta_s"] = figures["time/write_delta"]
            times["bytes_over_whole"] = figures["weights/delta_bytes"] / self.policies.num_bytes
        return times

    @property
    def directory(self) -> Path:
        """The newest policy."""
        return self.layout.weights_step(self.version)

    @property
    def offer(self) -> FetchablePolicy:
        """The newest policy as servers are told of it."""
        return offer_policy(self.directory, sources=[f"http://{self.link.near}:{ORIGIN_PORT}"])

    def fetch(self) -> dict[str, float]:
        """Have the node get the newest policy without an engine."""
        if self.node is None:
            words = sys.executable, Path(__file__).with_name("weight_node.py"), self.layout.secret, self.transport
            where = self.link.far if self.transport == "gloo" else self.cache
            self.node = subprocess.Popen(self.link.inside(*words, where), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.node.stdin is not None
        assert self.node.stdout is not None
        announced: object = self.offer
        if self.transport == "gloo":
            self.store_port = self.store_port or int(self.node.stdout.readline())
            manifest = read_manifest(self.directory)
            transfer = TransferRound(
                version=manifest.version,
                digest=manifest.digest,
                group_id=str(self.version),
                host=self.link.far,
                port=self.store_port,
                world_size=2,
                timeout_s=TRANSFER_TIMEOUT_S,
            )
            announced = (msgspec.structs.replace(transfer, rank_offset=1), manifest.weight_files)
            self.open_sender().begin(transfer)
        self.node.stdin.write(msgspec.json.encode(announced) + b"\n")
        self.node.stdin.flush()
        return json.loads(self.node.stdout.readline())

    def open_sender(self) -> WeightSender:
        """Return the trainer's end of transfers in memory."""
        if self.sender is None:
            self.sender = WeightSender(self.layout, device=torch.device("cpu"), key=self.secret.derive(KEY_PURPOSE))
        return self.sender

    def close(self) -> None:
        """End the node."""
        if self.node is not None:
            self.node.communicate()


async def send_in_memory(bench: Bench, client: InferenceClient) -> None:
    """Do what orchestrator and trainer do: plan a round, send the newest policy, and have the server receive it."""
    if bench.rounds is None:

        async def announce(transfer: TransferRound) -> None:
            bench.open_sender().begin(transfer)

        bench.rounds = TransferRounds(announce, timeout_s=TRANSFER_TIMEOUT_S)
        bench.server = Server(client=client)
    server, rounds = bench.server, bench.rounds
    assert server is not None
    assert rounds is not None
    server.is_admitted, server.status = True, await client.served_policy()
    digest = read_manifest(bench.directory).digest
    policy = TargetPolicy(version=PolicyVersion(bench.version), digest=digest, directory=bench.directory)
    status = await server.ensure_policy((await rounds.begin([server], policy))[server], is_known_to_differ=True)
    assert status.source == "gloo", f"the server has loaded it from {status.source}"


async def serve_round(bench: Bench, client: InferenceClient, load: Load, log: Path) -> dict[str, float]:
    """Bring the next policy to the server."""
    await asyncio.sleep(RATE_WINDOW_S)
    began = time.perf_counter()
    rate = load.rate(began - RATE_WINDOW_S, began)
    times = await bench.publish()
    published = time.perf_counter()
    if bench.transport == "gloo":
        await send_in_memory(bench, client)
    elif bench.transport == "files":
        await client.update_weights(bench.directory)
    else:
        await client.fetch_weights(bench.offer)
    loaded = time.perf_counter()
    answer = await client.generate([1, 2, 3], max_tokens=1, temperature=1.0)
    served = time.perf_counter()
    assert [run.version for run in answer.versions] == [bench.version]
    await asyncio.sleep(1)
    said = await asyncio.to_thread(log.read_text)
    pause = float(dict(_LOADED.findall(said))[str(bench.version)])
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(bench.directory)}}
    async with httpx.AsyncClient(timeout=900, headers={"Authorization": f"Bearer {bench.secret.token}"}) as http:
        started = time.perf_counter()
        (await http.post(f"{load.url}/collective_rpc", json=body)).raise_for_status()
        reload = time.perf_counter() - started
    if bench.transport in ("http", "delta"):
        times["fetch_s"] = float(dict(_FETCHED.findall(said))[str(bench.version)])
    return times | {
        "published_to_loaded_s": loaded - published,
        "pause_s": pause,
        "reload_s": reload,
        "pause_over_reload": pause / reload,
        "gap_s": load.longest_gap(published, served + 1),
        "served_s": served - began,
        "tokens_per_s": rate,
        "lost_tokens": rate * pause,
    }


@contextmanager
def process(*command: str | Path, log: Path, environ: dict[str, str] | None = None) -> Iterator[None]:
    """Run a program for a block."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environ or {})}
        )
    try:
        yield
    finally:
        child.terminate()
        child.wait(60)


async def measure(policies: Policies, directory: Path, args: argparse.Namespace) -> None:
    """Measure each rate of the link, and record a row for each."""
    layout, log = RunLayout(directory / "run"), directory / "server.log"
    with ExitStack() as stack:
        link = stack.enter_context(Link())
        bench = Bench(
            layout=layout,
            secret=make_secret(layout.secret),
            policies=policies,
            link=link,
            transport=args.transport,
            share=args.share,
            cache=directory / "cache",
            deltas=DeltaPublisher(layout, _NEVER) if args.transport == "delta" else None,
        )
        stack.callback(bench.close)
        if args.transport in ("http", "delta"):
            words = ["--output-dir", layout.root, "--weights.origin.host", link.near, "--weights.origin.port", ORIGIN_PORT]
            stack.enter_context(process(sys.executable, "-m", "trivet.origin", *map(str, words), log=directory / "origin.log"))
        async with AsyncExitStack() as serving:
            url = f"http://{link.far}:{SERVER_PORT}"
            load, client = Load(url, args.requests), InferenceClient(url, timeout_s=900, find_token=lambda: bench.secret.token)
            await serving.enter_async_context(aclosing(client))
            if args.serve:
                policies.write(model := directory / "model")
                words = {
                    "--output-dir": layout.root,
                    "--weight-cache": directory,
                    "--model.name": model,
                    "--model.enforce-eager": "true",
                    "--model.max-model-len": 4096,
                    "--server.host": link.far,
                    "--server.port": SERVER_PORT,
                    "--weights-transport": "gloo" if args.transport == "gloo" else "files",
                }
                command = [
                    sys.executable,
                    "-m",
                    "trivet.inference.main",
                    *(str(word) for pair in words.items() for word in pair),
                ]
                environ = {"VLLM_SERVER_DEV_MODE": "1"}  # has /collective_rpc
                stack.enter_context(process(*link.inside(*command), log=log, environ=environ))
                await client.wait_ready(900)
                ids = [7 + number % 80 for number in range(PROBE_TOKENS + 1)]
                scores = await client.score(ids, model=await client.model_name())
                bench.probe = Probe(dtype="bfloat16", samples=[ProbeSample(ids, scores[1:])])
                await serving.enter_async_context(load.running())

            async def take_round() -> dict[str, float]:
                if args.serve:
                    times = await serve_round(bench, client, load, log)
                else:
                    times = await bench.publish() | await asyncio.to_thread(bench.fetch)
                copy = await asyncio.to_thread(copy_plainly, link, bench.directory, directory / "copy")
                return times | {"copy_s": copy} | ({"fetch_over_copy": times["fetch_s"] / copy} if "fetch_s" in times else {})

            link.limit(max(args.gbit))
            for gbit in args.gbit:
                if args.warm_up:
                    await take_round()
                link.limit(gbit)
                rounds: list[dict[str, float]] = []
                for _ in range(args.rounds):
                    rounds.append(await take_round())
                    print(args.transport, gbit, {name: round(value, 3) for name, value in rounds[-1].items()}, flush=True)
                medians = {name: round(statistics.median(times[name] for times in rounds), 4) for name in rounds[0]}
                model = args.model.name if args.model else f"made up, {args.size} GB"
                key = {"model": model, "transport": args.transport, "gbit": gbit, "served": args.serve}
                row = key | {"bytes": policies.num_bytes, "share": args.share, "rounds": args.rounds, **medians}
                await asyncio.to_thread(record, row, args.record)


def record(row: dict[str, Any], path: Path | None) -> None:
    """Print the row as the only one, or put it into the file in place of the one of the same model, transport and rate."""
    rows = json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
    keys = ("model", "transport", "gbit", "served")
    others = [other for other in rows if any(other[key] != row[key] for key in keys)]
    result = {"bench": "weight_transports", "hardware": hardware(), "rows": [*others, row]}
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory with one file of bf16 weights")
    parser.add_argument("--size", type=int, choices=[2, 8, 16], help="GB of a made-up model instead")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--transport", choices=["files", "http", "delta", "gloo"], default="files")
    parser.add_argument("--gbit", nargs="+", type=float, default=[1, 10])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="0: none, for large models")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with what has been made removed
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as scratch:
        policies = load_policies(args.model) if args.model else make_policies(args.size)
        asyncio.run(measure(policies, Path(scratch), args))


if __name__ == "__main__":
    main()
