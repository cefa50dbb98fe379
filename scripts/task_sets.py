"""Do task sets of others run and train? OpenEnv and TextArena through verifiers 0.4, on real servers, with SmolLM2 on a CPU.

    uv run python scripts/task_sets.py --venv DIRECTORY [--sets openenv-echo ...] [--steps 20] [--record FILE]

DIRECTORY is a virtual environment with `verifiers[ta,openenv]==0.4.0` and trivet-worker. TextArena's games need the word list of
NLTK. Each set is tested with `trivet env test`, then trained for some steps. The last line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from bench.training import hardware

from trivet.config.layout import RunLayout
from trivet.process.lifetime import module_command
from trivet.process.sockets import ReservedPorts

ROOT = Path(__file__).parents[1]
GAMES = ROOT / "tests/support/openenv_games.py"
CONFIG = ROOT / "configs/smollm2/rl.toml"
CHAT = {"player": {"harness": {"id": "null"}}}
"""The agent is a chat: verifiers' default harness gives the model a shell."""
SEEDS = [{"seed": seed} for seed in range(64)]
NUM_COMPARED = 3
"""Steps at each end whose mean reward is compared."""
TIMEOUT_S = 3600


class TaskSet(NamedTuple):
    """A task set of others."""

    env_id: str
    args: dict[str, Any]
    game: str = ""
    """The environment of OpenEnv that is served for it."""


SETS = {
    "openenv-echo": TaskSet("openenv", {"resets": SEEDS, **CHAT}, game="echo"),
    "openenv-guess": TaskSet("openenv", {"resets": SEEDS, **CHAT}, game="guess"),
    "textarena-hangman": TaskSet("textarena", {"game": "Hangman-v0", "select": {"limit": 64}, **CHAT}),
    "textarena-word-search": TaskSet("textarena", {"game": "WordSearch-v0", "select": {"limit": 64}, **CHAT}),
}


@contextmanager
def serve(task_set: TaskSet, venv: Path) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a task set, with the address of its server while that runs."""
    if not task_set.game:
        yield task_set.args
        return
    with ReservedPorts() as ports:
        port = ports.reserve("127.0.0.1", preferred=0)
    server = subprocess.Popen([venv / "bin/python", GAMES, task_set.game, str(port)])
    try:
        yield {**task_set.args, "base_url": f"http://127.0.0.1:{port}"}
    finally:
        server.terminate()
        server.wait(60)


def test(task_set: TaskSet, args: dict[str, Any], venv: Path) -> dict[str, Any]:
    """Return the report of `trivet env test`."""
    words = ["env", "test", task_set.env_id, "--venv", str(venv), "--args", json.dumps(args)]
    words += ["--examples", "4", "--rollouts", "2", "--json"]
    done = subprocess.run(
        module_command("trivet.cli.main", *words), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if not done.stdout:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)


def train(task_set: TaskSet, args: dict[str, Any], venv: Path, directory: Path, *, model: Path, steps: int) -> list[float]:
    """Return the mean reward of each step."""
    table = json.dumps([{"id": task_set.env_id, "venv": str(venv), "args": args}])
    values = {
        "--output-dir": directory,
        "--model.name": model,
        "--max-steps": steps,
        "--max-model-len": 2048,
        "--orchestrator.batch-size": 16,
        "--orchestrator.rollouts-per-example": 8,
        "--orchestrator.sampling.max-tokens": 24,
        "--orchestrator.env": table,
        "--ckpt.interval": steps,
    }
    words = [str(word) for pair in values.items() for word in pair]
    command: Sequence[str] = module_command("trivet.launcher.commands.rl", "@", str(CONFIG), *words)
    subprocess.run(command, timeout=TIMEOUT_S, check=True, stdout=sys.stderr)
    subprocess.run(module_command("trivet.cli.main", "check", str(directory)), check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in (RunLayout(directory).metrics / "orchestrator.jsonl").read_text().splitlines()]
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for name in arguments.sets:
        with tempfile.TemporaryDirectory() as directory, serve(SETS[name], arguments.venv) as args:
            report = test(SETS[name], args, arguments.venv)
            rewards = train(SETS[name], args, arguments.venv, Path(directory), model=arguments.model, steps=arguments.steps)
        found[name] = {
            "reward_first": round(fmean(rewards[:NUM_COMPARED]), 4),
            "reward_last": round(fmean(rewards[-NUM_COMPARED:]), 4),
            "rewards": [round(reward, 4) for reward in rewards],
            "policies": {row["policy"]: row["mean_reward"] for row in report["policies"]},
            "judgement": report["judgement"],
        }
        print(f"{name}: {found[name]['reward_first']} -> {found[name]['reward_last']}", flush=True)
        summary = {"bench": "task_sets", "steps": arguments.steps, "hardware": hardware(), "sets": found}
        if arguments.record is not None:
            arguments.record.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
