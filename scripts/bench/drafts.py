"""Where does speculative decoding with ngram drafts gain, on a CPU?

One real server without drafts and one with them, one after the other, complete the same prompts, a number of requests at a time.
`repeating` is greedy: a random model soon repeats itself, so nearly every draft is accepted. `varied` samples at temperature 1: the
prompt repeats itself and offers drafts, and nearly none is accepted. A run lies between the two.

    uv run python scripts/bench/drafts.py --model models/smollm2 [--dtype bfloat16] [--at-once 1 8 32] [--length 128] [--repeats 3]

Tokens a second, medians over the repeats after one warm-up; `gain` is that with drafts over that without. The last line is one
JSON object.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

import httpx
from receiving import free_port
from training import hardware

from trivet.client.inference_client import InferenceClient
from trivet.config.dump import to_toml
from trivet.config.schema.inference import InferenceConfig, InferenceModelConfig, ServerConfig

NUM_DRAFTS = 4
TEMPERATURES = {"repeating": 0.0, "varied": 1.0}
READY_TIMEOUT_S = 300.0
PERIOD = 8
"""Tokens after which a prompt repeats itself."""


def serve_config(args: argparse.Namespace, directory: Path, *, has_drafts: bool) -> InferenceConfig:
    """Return the configuration of a server."""
    drafts = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    return InferenceConfig(
        output_dir=directory,
        server=ServerConfig(port=free_port()),
        model=InferenceModelConfig(name=str(args.model), dtype=args.dtype, max_model_len=1024, enforce_eager=True),
        max_num_seqs=max(args.at_once),
        vllm_args={"speculative_config": drafts} if has_drafts else {},
    )


def count_drafts(base_url: str) -> tuple[float, float]:
    """Return the drafted tokens and the accepted ones since the server started."""
    text = httpx.get(f"{base_url}/metrics", timeout=60).text
    names = ("num_draft_tokens", "num_accepted_tokens")
    found = (re.findall(rf"^vllm:spec_decode_{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE) for name in names)
    drafted, accepted = (sum(map(float, values)) for values in found)
    return drafted, accepted


async def measure(args: argparse.Namespace, base_url: str) -> dict[str, dict[str, float]]:
    """Return the tokens a second, and the share of drafts that were accepted, for each kind of text and number of requests."""
    found: dict[str, dict[str, float]] = {}
    async with aclosing(InferenceClient(base_url, timeout_s=READY_TIMEOUT_S)) as client:
        await client.wait_ready(READY_TIMEOUT_S)
        for kind, temperature in TEMPERATURES.items():
            for at_once in args.at_once:
                # each request has a prompt of its own, so that no prefix is shared
                prompts = [[100 + 50 * number + i % PERIOD for i in range(4 * PERIOD)] for number in range(at_once)]
                rates: list[float] = []
                before = count_drafts(base_url)
                for _ in range(1 + args.repeats):
                    started = time.perf_counter()
                    requests = [client.generate(each, max_tokens=args.length, temperature=temperature) for each in prompts]
                    num_tokens = sum(len(answer.token_ids) for answer in await asyncio.gather(*requests))
                    rates.append(num_tokens / (time.perf_counter() - started))
                drafted, accepted = (b - a for a, b in zip(before, count_drafts(base_url), strict=True))
                found[f"{kind}_{at_once}"] = {
                    "tokens_per_s": round(statistics.median(rates[1:]), 1),
                    "accepted_share": round(accepted / max(1.0, drafted), 3),
                }
    return found


def run_side(args: argparse.Namespace, *, has_drafts: bool) -> dict[str, dict[str, float]]:
    """Start a server, measure it and end it."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = serve_config(args, directory, has_drafts=has_drafts)
        (directory / "inference.toml").write_text(to_toml(config))
        command = [sys.executable, "-m", "trivet.inference.main", "@", str(directory / "inference.toml")]
        with (directory / "inference.stdout").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            return asyncio.run(measure(args, f"http://127.0.0.1:{config.server.port}"))
        finally:
            server.terminate()
            server.wait(60)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model directory")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 32], help="requests at a time")
    parser.add_argument("--length", type=int, default=128, help="tokens of a completion")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    plain, drafted = run_side(args, has_drafts=False), run_side(args, has_drafts=True)
    cases = {
        case: {
            "tokens_per_s": plain[case]["tokens_per_s"],
            "with_drafts": drafted[case]["tokens_per_s"],
            "accepted_share": drafted[case]["accepted_share"],
            "gain": round(drafted[case]["tokens_per_s"] / plain[case]["tokens_per_s"], 3),
        }
        for case in plain
    }
    config = {key: str(value) for key, value in vars(args).items()} | {"drafts": NUM_DRAFTS}
    print(json.dumps({"benchmark": "drafts", "cases": cases, "config": config, "hardware": hardware()}))


if __name__ == "__main__":
    main()
