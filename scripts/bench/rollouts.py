"""How fast is the whole path of rollouts: environment, server, scores, samples, packing, sending?

One inference server; the orchestrator fills and sends batches to a stand-in trainer that acknowledges and never publishes.
Next to it, in the same run and on the same server, verifiers' own `generate` makes as many rollouts: that is the ceiling of
what an orchestrator around this server and these environments can reach. Medians over steps, the first left out.

    uv run python scripts/bench/rollouts.py --model models/tiny [--batch-size 128] [--max-tokens 32] [--steps 5]
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from receiving import free_port

from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EnvConfig
from trivet.config.schema.inference import ClientConfig, InferenceConfig, InferenceModelConfig, ServerConfig
from trivet.config.schema.orchestrator import OrchestratorConfig, PolicyModelConfig, SamplingConfig
from trivet.config.schema.shared import CkptConfig, TransportConfig, WeightsConfig
from trivet.environments.apis.turns import request_arguments
from trivet.environments.apis.v0.load import load_environment
from trivet.environments.apis.v0.play import ModelClient
from trivet.environments.settings import host_settings, sampling_arguments
from trivet.orchestrator.environment_node import open_environments
from trivet.orchestrator.start import run
from trivet.secret import find_secret
from trivet.transport.zeromq import ZmqReceiver
from trivet.wire.versions import Step


def start_server(args: argparse.Namespace, directory: Path, port: int) -> subprocess.Popen[bytes]:
    """Start an inference server."""
    config = InferenceConfig(
        output_dir=directory,
        server=ServerConfig(port=port),
        model=InferenceModelConfig(name=str(args.model), dtype=args.dtype, max_model_len=1024, enforce_eager=True),
        max_num_seqs=args.batch_size,
    )
    path = directory / "inference.toml"
    path.write_text(to_toml(config))
    with (directory / "inference.stdout").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "trivet.inference.main", "@", str(path)], stdout=log, stderr=log, start_new_session=True
        )


def orchestrator_config(args: argparse.Namespace, directory: Path, port: int) -> OrchestratorConfig:
    """Return the configuration of the orchestrator."""
    return OrchestratorConfig(
        output_dir=directory,
        max_steps=args.steps + 1,
        batch_size=args.batch_size,
        rollouts_per_example=args.rollouts_per_example,
        oversampling_factor=args.oversampling_factor,
        max_async_level=args.steps + 1,
        max_off_policy_steps=args.steps + 1,
        weights=WeightsConfig(probe_tokens=0),
        client=ClientConfig(base_url=[f"http://127.0.0.1:{port}/v1"]),
        model=PolicyModelConfig(name=str(args.model)),
        sampling=SamplingConfig(max_tokens=args.max_tokens),
        env=[EnvConfig(id=args.env)],
        rollout_transport=TransportConfig(port=free_port()),
        ckpt=CkptConfig(),
    )


def acknowledge_batches(config: OrchestratorConfig, tokens: list[int], times: list[float], is_over: threading.Event) -> None:
    """Acknowledge every batch, and note its tokens and its time."""
    secret = find_secret(RunLayout(config.output_dir), environ=os.environ)
    receiver = ZmqReceiver(config.rollout_transport, secret=secret, run=config.run)
    try:
        receiver.receive(Step(0))  # the self-check, empty here
        for step in range(1, (config.max_steps or 0) + 1):
            batch = receiver.receive(Step(step))
            tokens.append(batch.num_loss_tokens)
            times.append(time.monotonic())
        is_over.wait(60)  # a receiver that closes at once may take the last acknowledgement with it
    finally:
        receiver.close()


async def run_orchestrator(config: OrchestratorConfig) -> None:
    """Run the orchestrator."""
    async with open_environments(config) as pool:
        await run(config, pool)


async def run_verifiers(config: OrchestratorConfig) -> float:
    """Return sampled tokens per second of verifiers' own loop over as many rollouts as one batch."""
    env = load_environment(host_settings(config.env[0], model_name=config.model.name, client=config.client))
    client = ModelClient(AsyncOpenAI(base_url=config.client.base_url[0], api_key="EMPTY", timeout=600.0, max_retries=0))
    num_examples = config.batch_size // config.rollouts_per_example
    rows: list[Any] = [row for row in env.get_dataset(num_examples) for _ in range(config.rollouts_per_example)]
    arguments = request_arguments(sampling_arguments(config.sampling, temperature=1.0), seed=None)
    rates: list[float] = []
    for _ in range(3):
        started = time.monotonic()
        outputs = await env.generate(rows, client, config.model.name, arguments, state_columns=["trajectory"])
        seconds = time.monotonic() - started
        sampled = [len(step["tokens"]["completion_ids"]) for output in outputs["outputs"] for step in output["trajectory"]]
        rates.append(sum(sampled) / seconds)
    await client.close()
    return statistics.median(rates)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--env", default="reverse-text")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rollouts-per-example", type=int, default=16)
    parser.add_argument("--oversampling-factor", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, port = Path(name), free_port()
        server = start_server(args, directory, port)
        try:
            config = orchestrator_config(args, directory, port)
            tokens: list[int] = []
            times: list[float] = []
            is_over = threading.Event()
            trainer = threading.Thread(target=acknowledge_batches, args=(config, tokens, times, is_over), daemon=True)
            trainer.start()
            asyncio.run(run_orchestrator(config))
            is_over.set()
            trainer.join(timeout=30)
            verifiers_rate = asyncio.run(run_verifiers(config))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
    rates = [count / duration for count, duration in zip(tokens[1:], seconds, strict=True)]
    result = {
        "bench": "rollouts",
        "tokens_per_s": round(statistics.median(rates), 1),
        "step_s": round(statistics.median(seconds), 3),
        "step_s_spread": [round(min(seconds), 3), round(max(seconds), 3)],
        "verifiers_tokens_per_s": round(verifiers_rate, 1),
        "ratio_to_verifiers": round(statistics.median(rates) / verifiers_rate, 3),
        "config": {key: str(value) for key, value in vars(args).items()},
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
