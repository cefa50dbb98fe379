"""How many seconds pass from weights in the trainer's memory to tokens sampled from them?

Publishing writes, syncs and hashes every byte; loading reads them twice, to verify and into the engine, and pauses sampling
for the second only. The ceiling is bytes / disk bandwidth for the write, plus two reads, usually from the page cache.

    uv run python scripts/bench/weights.py [--model DIRECTORY] [--repeats 5]

Without a model it makes the quickstart's tiny one. It publishes as the trainer does, loads over HTTP, and counts a policy as
served when a token carries its version. Medians over the repeats after one warm-up; the last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from trivet.client.inference_client import InferenceClient
from trivet.config.layout import RunLayout
from trivet.secret import make_secret
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyVersion


def make_tiny_model(directory: Path) -> Path:
    """Write a tiny model; return its directory."""
    subprocess.run([sys.executable, "-m", "trivet.examples.tiny_model", directory], check=True)
    return directory


def model_writer(model: Path) -> Callable[[Path], None]:
    """Return a function that writes the model's weights to a directory."""
    weights, tokenizer = AutoModelForCausalLM.from_pretrained(model, dtype="auto"), AutoTokenizer.from_pretrained(model)

    def write(directory: Path) -> None:
        weights.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    return write


async def measure(
    client: InferenceClient, layout: RunLayout, write: Callable[[Path], None], *, repeats: int
) -> list[tuple[float, float]]:
    """Return the seconds of publishing, and those until a token of the policy, for each repeat."""
    times: list[tuple[float, float]] = []
    for version in range(1, repeats + 2):
        started = time.perf_counter()
        await asyncio.to_thread(publish, layout, version=PolicyVersion(version), run_id="bench", write=write)
        published = time.perf_counter()
        await client.update_weights(layout.weights_step(version))
        answer = await client.generate([1, 2, 3], max_tokens=1, temperature=1.0)
        served = time.perf_counter()
        assert [run.version for run in answer.versions] == [version]
        times.append((published - started, served - started))
    return times[1:]


async def run(model: Path, directory: Path, *, port: int, repeats: int) -> dict[str, object]:
    """Start a server and measure."""
    layout = RunLayout(directory)
    secret = make_secret(layout.secret)
    async with aclosing(InferenceClient(f"http://127.0.0.1:{port}", timeout_s=600, find_token=lambda: secret.token)) as client:
        await client.wait_ready(600)
        times = await measure(client, layout, model_writer(model), repeats=repeats)
    num_bytes = sum(path.stat().st_size for path in layout.weights_step(1).iterdir())
    publish_s, total_s = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "publish_to_served_s": round(total_s, 4),
        "spread_s": round(max(total for _, total in times) - min(total for _, total in times), 4),
        "publish_s": round(publish_s, 4),
        "load_to_served_s": round(total_s - publish_s, 4),
        "bytes": num_bytes,
        "mib_per_s": round(num_bytes / 2**20 / total_s, 1),
        "model": model.name,
        "repeats": repeats,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=8093)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as scratch:
        model = args.model or make_tiny_model(Path(scratch) / "tiny")
        directory = Path(scratch) / "outputs"
        command = [sys.executable, "-m", "trivet.inference.main", "--model.name", str(model), "--server.port", str(args.port)]
        command += ["--output-dir", str(directory)]
        with (Path(scratch) / "inference.stdout").open("wb") as log:
            server = subprocess.Popen([*command, "--model.enforce-eager", "true"], stdout=log, stderr=subprocess.STDOUT)
        try:
            result = asyncio.run(run(model, directory, port=args.port, repeats=args.repeats))
        finally:
            server.terminate()
            server.wait(30)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
