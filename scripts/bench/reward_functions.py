"""Does a script of TRL's GRPOTrainer learn the same with `trivet.RLTrainer`, when its class and its data argument are changed?

Both trainers get the same reward functions, which are called by TRL's conventions, with the same weights, prompts, start model,
group size, batch size and learning rate. The start model is `trivet.examples.tiny_model` with random weights, which writes random
characters. The functions ask for vowels, and for as many characters as a column of the data says.

    pip install --target DIRECTORY --no-deps trl==1.16.0
    uv run python scripts/bench/reward_functions.py --trl DIRECTORY [--steps 40]

The ceiling of the mean reward is 1.375, because a quarter of the prompts wants no length. The curves are not equal, because the
seeds draw other numbers. `trivet` is one step off-policy, as by default; `trivet_synchronous` waits for each policy, as TRL does.
The last line is one JSON object with the mean reward of each step.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from training import hardware
from transformers import AutoModelForCausalLM, AutoTokenizer

import trivet

GROUP_SIZE, BATCH_SIZE, MAX_TOKENS, LEARNING_RATE, SEED = 8, 64, 16, 3e-3, 0
WEIGHTS = [1.0, 0.5]
NUM_PROMPTS = 64
SIDES = ("trivet", "trivet_synchronous", "trl")
TIMEOUT_S = 3600
NUM_AVERAGED = 5
"""Steps at the start and at the end of a curve whose mean is reported."""


def vowels(completions, **kwargs):  # noqa: ANN001, ANN003, ANN201  as such functions are written
    """Return the share of vowels in each completion."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(character in "aeiou" for character in text) / max(len(text), 1) for text in texts]


async def of_length(completions, length, **kwargs):  # noqa: ANN001, ANN003, ANN201
    """Return 1 for a completion of the wanted length, and less for another; nothing for a prompt that wants none."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        None if wanted is None else max(0.0, 1 - abs(len(text) - wanted) / wanted)
        for text, wanted in zip(texts, length, strict=True)
    ]


def prompts() -> list[dict[str, Any]]:
    """Return the data: every fourth prompt asks for no length."""
    return [
        {"prompt": [{"role": "user", "content": f"say {index}"}], "length": None if index % 4 == 0 else 8}
        for index in range(NUM_PROMPTS)
    ]


def train_with_trl(model: Path, steps: int) -> list[float]:
    """Return the mean reward of each step of GRPOTrainer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[reportMissingImports]  it is nowhere but in --trl

    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model),
            reward_funcs=[vowels, of_length],
            train_dataset=Dataset.from_list(prompts()),
            args=GRPOConfig(
                output_dir=scratch,
                max_steps=steps,
                per_device_train_batch_size=BATCH_SIZE,
                num_generations=GROUP_SIZE,
                max_completion_length=MAX_TOKENS,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                reward_weights=WEIGHTS,
                temperature=1.0,
                beta=0.0,
                seed=SEED,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.train()
        return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def train_with_trivet(model: Path, steps: int, *, num_batches_ahead: int) -> list[float]:
    """Return the mean reward of each step of RLTrainer."""
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trivet.RLTrainer(
            model=model,
            reward_funcs=[vowels, of_length],
            train_dataset=prompts(),
            args=trivet.RLConfig(
                output_dir=f"{scratch}/run",
                max_steps=steps,
                batch_size=BATCH_SIZE,
                micro_batch_size=BATCH_SIZE,
                rollouts_per_example=GROUP_SIZE,
                max_tokens=MAX_TOKENS,
                max_seq_len=128,
                learning_rate=LEARNING_RATE,
                reward_weights=WEIGHTS,
                temperature=1.0,
                loss="grpo",
                num_batches_ahead=num_batches_ahead,
                use_lora=False,
                bf16=False,
                seed=SEED,
                save_strategy="no",
                inference={"cpu_kv_cache_gib": 0.125, "max_num_seqs": 64, "model": {"dtype": "float32", "enforce_eager": True}},
            ),
            progress=False,
        )
        return [step.reward for step in trainer]


def train_in_process(side: str, args: argparse.Namespace, model: Path) -> list[float]:
    """Return the curve of one side, trained in a process of its own."""
    paths = os.pathsep.join(filter(None, [str(args.trl.absolute()), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": paths} if side == "trl" else dict(os.environ)
    command = [sys.executable, __file__, "--side", side, "--model", str(model), "--steps", str(args.steps)]
    done = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, help="where TRL is installed")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        ahead = int(args.side == "trivet")
        curve = train_with_trl(args.model, args.steps) if args.side == "trl" else None
        print(json.dumps(curve or train_with_trivet(args.model, args.steps, num_batches_ahead=ahead)))
        return
    if args.trl is None or not (args.trl / "trl").is_dir():
        parser.error("--trl names a directory with TRL in it: pip install --target DIRECTORY --no-deps trl==1.16.0")
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        make = [sys.executable, "-m", "trivet.examples.tiny_model", str(model), "--hidden-size", "128", "--layers", "2"]
        subprocess.run([*make, "--seed", str(SEED)], check=True, stdout=subprocess.DEVNULL)
        curves = {side: train_in_process(side, args, model) for side in SIDES}
    ends = {
        f"{side}_{name}": round(sum(part) / len(part), 3)
        for side, curve in curves.items()
        for name, part in (("first", curve[:NUM_AVERAGED]), ("last", curve[-NUM_AVERAGED:]))
    }
    config = {"steps": args.steps, "batch_size": BATCH_SIZE, "group_size": GROUP_SIZE, "learning_rate": LEARNING_RATE}
    found = {
        "benchmark": "reward_functions",
        **ends,
        **{f"{side}_rewards": [round(reward, 4) for reward in curve] for side, curve in curves.items()},
        "config": {
            **config,
            "max_tokens": MAX_TOKENS,
            "weights": WEIGHTS,
            "trl": "1.16.0",
            "python": platform.python_version(),
        },
        "hardware": hardware(),
        "torch": torch.__version__,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
