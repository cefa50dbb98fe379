"""Does a run learn as much from a rollout, and from a second, as TRL's GRPO trainer does?

Every side starts from the same weights, which were shown texts that are mostly copied and seldom reversed. It learns to reverse
with the same groups, lengths, learning rate and dtype. What is compared is the mean reward of each step's rollouts, over the
rollouts that were made and over the seconds since the first step began: ours when the trainer waits for the first batch, TRL's
when it generates the first one. Our sides are real `rl` runs: the default loss, GRPO and CISPO one step asynchronous, the
default loss with advantages over the group's standard deviation (as TRL has them), without dithered start weights (which matters
in bfloat16), and at 0 and 4 steps.

    uv run python -m trivet.examples.smollm2 models/smollm2
    uv run python -m trivet.examples.quickstart_data outputs/smollm2/sft.jsonl --examples 6400 --share-reversed 0.2
    uv run sft @ configs/smollm2/sft.toml
    pip install --target DIRECTORY --no-deps trl==1.16.0
    uv run python scripts/bench/learning.py --model outputs/smollm2/sft/weights/step_80 --trl DIRECTORY [--dtype float32]
        [--task reverse_text] [--steps 30] [--seeds 0 1 2]
        [--sides default grpo cispo std_norm undithered async_0 async_4 trl]
        [--lr 1e-5] [--busy] [--record docs/benchmarks/learning.json]

The task spell_backward is one of reasoning-gym: its start is that of configs/spell_backward, its file another --record, and TRL's
directory needs the package too (pip install --target DIRECTORY reasoning-gym). A run takes five to twenty minutes, so each is kept
in --record when it is over, and is not taken again: the comparison can be made in parts, by side and by seed. With --busy, while
other programs run, rewards are kept and seconds are not. `plot.py` draws the record. The last line is one JSON object.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import verifiers as vf
from beside_trl import AT_ONCE, TRL_SETTINGS, trl_environment
from datasets import Dataset
from training import hardware
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from whole_step import GROUP_SIZE, ROOT

from reverse_text import reversal_reward
from trivet.config.layout import RunLayout

CONFIGS = {
    "reverse_text": ROOT / "configs/smollm2/reverse_text.toml",
    "spell_backward": ROOT / "configs/spell_backward/rl.toml",
}
"""The configuration of each task."""
COMPLETIONS = 64
MAX_TOKENS = 24
"""The completions of a step and the tokens of one."""
FLAGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "grpo": ("--trainer.loss.type", "grpo"),
    "cispo": ("--trainer.loss.type", "cispo"),
    "std_norm": ("--orchestrator.advantage.type", "std_norm"),
    "undithered": ("--trainer.model.dither", "false"),
    "async_0": ("--max-async-level", "0"),
    "async_4": ("--max-async-level", "4"),
}
"""The flags of each side that is ours."""
SIDES = (*FLAGS, "trl")


def learn_ours(side: str, seed: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Take a run of ours; returns the mean reward of each step and the seconds until it was trained."""
    with tempfile.TemporaryDirectory() as scratch:
        layout = RunLayout(Path(scratch) / "run")
        flags = {
            "--output-dir": layout.root,
            "--max-steps": args.steps,
            "--model.name": Path(args.model).absolute(),
            "--trainer.model.compute-dtype": args.dtype,
            "--trainer.optim.lr": args.lr,
            "--orchestrator.batch-size": COMPLETIONS,
            "--orchestrator.sampling.max-tokens": MAX_TOKENS,
            "--seed": seed,
            "--ckpt.interval": 10_000,
        }
        words = [str(word) for pair in flags.items() for word in pair]
        command = [sys.executable, "-m", "trivet.launcher.commands.rl", "@", str(CONFIGS[args.task]), *words, *FLAGS[side]]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        trained, made = (
            [json.loads(line) for line in (layout.metrics / f"{role}.jsonl").read_text().splitlines()]
            for role in ("trainer", "orchestrator")
        )
    begun = trained[0]["time"] - trained[0]["time/step"]
    return {
        "rewards": [round(step["reward/mean"], 4) for step in made],
        "seconds": [round(step["time"] - begun, 1) for step in trained],
    }


def load_task(name: str) -> tuple[Dataset, Callable[..., list[float]]]:
    """Return the prompts of a task for TRL, and the function that scores completions of them."""
    arguments = tomllib.loads(CONFIGS[name].read_text())["orchestrator"]["env"][0]["args"]
    if name == "reverse_text":
        rows = vf.load_environment("reverse-text", **arguments).get_dataset()
        return rows, lambda completions, answer, **_: list(map(reversal_reward, completions, answer))
    sys.path.append(str(ROOT / "environments/reasoning_tasks"))
    import reasoning_tasks  # pyright: ignore[reportMissingImports]  found in that directory alone

    rows = reasoning_tasks.load_environment(**arguments).get_dataset()
    tasks = reasoning_tasks.draw_tasks(arguments["task"], len(rows), seed=0, settings=arguments["settings"])
    score_one = partial(reasoning_tasks.score_text, tasks=tasks, partial_credit=arguments["partial_credit"])

    def score(completions: list[vf.Messages], info: list[dict[str, int]], **_: Any) -> list[float]:
        texts = [str(completion[-1]["content"]) for completion in completions]
        return [score_one(text, place=each["place"]) for text, each in zip(texts, info, strict=True)]

    return rows, score


def learn_trl(args: argparse.Namespace) -> dict[str, list[float]]:
    """Train with TRL in this process; returns the mean reward of each step and the seconds until it was trained."""
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[reportMissingImports]  it is nowhere but in --trl

    torch.set_float32_matmul_precision("medium")
    rewards: list[float] = []
    seconds: list[float] = []

    rows, score = load_task(args.task)

    def reward_of(**completions: Any) -> list[float]:
        found = score(**completions)
        rewards.append(round(statistics.mean(found), 4))
        return found

    class Clock(TrainerCallback):
        """Notes when each step ended."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(round(time.perf_counter() - started, 1))

    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs=reward_of,
            train_dataset=rows.select_columns(
                ["prompt", "answer", "info"] if "info" in rows.column_names else ["prompt", "answer"]
            ),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=AT_ONCE,
                gradient_accumulation_steps=COMPLETIONS // AT_ONCE,
                num_generations=GROUP_SIZE,
                max_completion_length=MAX_TOKENS,
                max_steps=args.steps,
                seed=args.seed,
                **(TRL_SETTINGS | {"learning_rate": args.lr, "lr_scheduler_type": "constant"}),
            ),
        )
        started = time.perf_counter()
        trainer.train()
    return {"rewards": rewards, "seconds": seconds}


def learn(side: str, seed: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Take one run, TRL's in a process of its own."""
    if side != "trl":
        return learn_ours(side, seed, args)
    words = [f"--{name}={getattr(args, name)}" for name in ("model", "task", "dtype", "steps", "lr")]
    command = [sys.executable, __file__, *words, f"--seed={seed}"]
    done = subprocess.run(command, env=trl_environment(args.trl), check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the directory of the weights that every side starts from")
    parser.add_argument("--trl", type=Path, help="where TRL is installed; needed for the side trl")
    parser.add_argument("--dtype", default="float32", help="the dtype that ours computes in; TRL's weights are float32")
    parser.add_argument("--task", choices=CONFIGS, default="reverse_text")
    parser.add_argument("--steps", type=int, default=30, help=f"of {COMPLETIONS} completions")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--busy", action="store_true", help="keep no seconds, because other programs run")
    parser.add_argument("--record", type=Path, default=Path("docs/benchmarks/learning.json"))
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.seed is not None:
        print(json.dumps(learn_trl(args)))
        return
    if "trl" in args.sides and (args.trl is None or not (args.trl / "trl").is_dir()):
        parser.error("--trl names a directory with TRL in it: pip install --target DIRECTORY --no-deps trl==1.16.0")
    config = {name: getattr(args, name) for name in ("task", "dtype", "steps", "lr")} | {
        "completions": COMPLETIONS,
        "group": GROUP_SIZE,
    }
    record: dict[str, Any] = {"benchmark": "learning", "config": config, "runs": []}
    if args.record.exists():
        record = json.loads(args.record.read_text())
        if record["config"] != config:
            parser.error(f"{args.record} holds runs with {record['config']}; name another --record")
    taken = {(run["side"], run["seed"]) for run in record["runs"]}
    for seed in args.seeds:
        for side in args.sides:
            if (side, seed) in taken:
                continue
            run = learn(side, seed, args) | ({"seconds": []} if args.busy else {})
            record["runs"].append({"side": side, "seed": seed, **run})
            record |= {"hardware": hardware(), "torch": torch.__version__}
            args.record.write_text(json.dumps(record) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
