"""Do task sets of others run and train? OpenEnv, TextArena, NeMo-Gym, Harbor, MCP tools and a game, with SmolLM2 on a CPU.

    uv run python scripts/task_sets.py --task-sets-venv DIR --nemo-gym-venv DIR --reasoning-venv DIR [--sets NAME ...]

The virtual environments: Python 3.12 with `verifiers[ta,openenv,harbor]==0.4.0`, trivet-worker, environments/shop_clerk and
environments/count_letters; Python 3.12 with `nemo-gym==0.4.0`; `verifiers==0.3.1` with trivet-worker and
environments/reasoning_tasks. TextArena's games need the word list of NLTK. Each set, and each environment of this repository, is
tested with `trivet env test`; then those in which the model can score are trained. The last line is one JSON object; a record keeps
the sets that are not run again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
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
SUPPORT = ROOT / "tests/support"
CONFIG = ROOT / "configs/smollm2/rl.toml"
CHAT = {"harness": {"id": "null"}}
"""The agent is a chat: verifiers' default harness gives the model a shell."""
SHELL = {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}
SMALL = (2, 2)
"""The size of a test in which every rollout starts a program: that of verifiers' harness takes seconds."""
SEEDS = [{"seed": seed} for seed in range(64)]
OWN = ("alphabet-sort", "math-python", "reverse-text", "wiki-search", "wordle")
"""Environments of this repository that are installed with it."""
NUM_COMPARED = 3
"""Steps at each end whose mean reward is compared."""
TIMEOUT_S = 3600


class TaskSet(NamedTuple):
    """A task set of others."""

    env_id: str
    args: dict[str, Any]
    server: str = ""
    """The environment of OpenEnv or the resource server of NeMo-Gym that is served for it."""
    venv: str = "task_sets"
    """The virtual environment in which it runs: "task_sets", "reasoning", or "auto" for trivet's own."""
    size: tuple[int, int] = (16, 8)
    """Examples to test, and rollouts of each by a sampling policy."""
    is_trained: bool = False
    """Whether SmolLM2 can score in it. It cannot call tools, and it does not find the form of a move by chance."""


SETS = {
    "openenv-echo": TaskSet("openenv", {"resets": SEEDS, "player": CHAT}, server="echo", is_trained=True, size=SMALL),
    "openenv-guess": TaskSet("openenv", {"resets": SEEDS, "player": CHAT}, server="guess", size=SMALL),
    "textarena-hangman": TaskSet("textarena", {"game": "Hangman-v0", "select": {"limit": 64}, "player": CHAT}, size=SMALL),
    "textarena-wordle": TaskSet(
        "textarena", {"game": "Wordle-v0", "select": {"limit": 64}, "player": CHAT}, is_trained=True, size=SMALL
    ),
    "textarena-word-search": TaskSet(
        "textarena", {"game": "WordSearch-v0", "select": {"limit": 64}, "player": CHAT}, size=SMALL
    ),
    "reset-step": TaskSet(f"{SUPPORT / 'higher_lower.py'}:load_environment", {}, venv="auto", is_trained=True),
    "mcp-shop-clerk": TaskSet("shop-clerk", {}, size=SMALL),
    "nemo-gym-weather": TaskSet(
        "nemo_gym", {"agent": CHAT}, server="example_single_tool_call.app:SimpleWeatherResourcesServer", size=SMALL
    ),
    "nemo-gym-mcqa": TaskSet("nemo_gym", {"agent": CHAT}, server="mcqa.app:MCQAResourcesServer", size=SMALL),
    "harbor": TaskSet("harbor", {"dataset": "small@1.0", "agent": SHELL}, size=SMALL),
    "count-letters": TaskSet("count-letters", {}),
    "gsm8k": TaskSet("gsm8k", {"dataset": "bundled"}, venv="auto"),
    "reasoning-tasks": TaskSet("reasoning-tasks", {}, venv="reasoning"),
    **{name: TaskSet(name, {}, venv="auto") for name in OWN},
}


@contextmanager
def serve(task_set: TaskSet, venvs: dict[str, str], directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a task set, while its server runs. Files go to `directory`."""
    args = dict(task_set.args)
    if task_set.env_id == "harbor":
        args["registry_path"] = str(write_registry(directory))
    if not task_set.server:
        yield args
        return
    venv, variables = Path(venvs[task_set.venv]), dict(os.environ)
    if task_set.env_id == "openenv":
        with ReservedPorts() as ports:
            port = ports.reserve("127.0.0.1", preferred=0)
        command = [venv / "bin/python", SUPPORT / "openenv_games.py", task_set.server, str(port)]
        args["base_url"] = f"http://127.0.0.1:{port}"
    else:
        nemo_venv = Path(venvs["nemo_gym"])
        (program,) = venv.glob("lib/*/site-packages/verifiers/v1/tasksets/nemo_gym/server.py")
        (data,) = nemo_venv.glob(f"lib/*/site-packages/resources_servers/{task_set.server.split('.')[0]}/data/example.jsonl")
        command = [nemo_venv / "bin/python", program]
        variables["NEMO_GYM_RESOURCE_SERVER"] = f"resources_servers.{task_set.server}"
        args["dataset"] = str(data)
    with (directory / "server.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=directory, env=variables, stdout=log, stderr=log)
        try:
            if task_set.env_id == "nemo_gym":
                args["task"] = {"resources_url": f"http://127.0.0.1:{await_port(directory / 'nemo_gym.port')}"}
            yield args
        finally:
            server.terminate()
            server.wait(60)


def await_port(file: Path) -> int:
    """Return the port that a server writes into a file when it is ready to start."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if file.exists() and (written := file.read_text()):
            return int(written)
        time.sleep(0.5)
    raise TimeoutError(f"the server wrote no port into {file}")


def write_registry(directory: Path) -> Path:
    """Write a registry of Harbor whose tasks are those of this repository, in a git repository as Harbor downloads them."""
    tasks = directory / "tasks"
    shutil.copytree(SUPPORT / "harbor_tasks", tasks)
    for words in (
        ["init"],
        ["add", "."],
        ["-c", "user.name=tasks", "-c", "user.email=tasks@localhost", "commit", "-m", "Add tasks"],
    ):
        subprocess.run(["git", "-C", tasks, *words], check=True, capture_output=True)
    listed = [{"name": task.parent.name, "git_url": str(tasks), "path": task.parent.name} for task in tasks.glob("*/task.toml")]
    registry = directory / "registry.json"
    registry.write_text(json.dumps([{"name": "small", "version": "1.0", "description": "small tasks", "tasks": listed}]))
    return registry


def test(task_set: TaskSet, args: dict[str, Any], venv: str) -> dict[str, Any]:
    """Return the report of `trivet env test`."""
    words = ["env", "test", task_set.env_id, "--venv", venv, "--args", json.dumps(args)]
    words += ["--examples", str(task_set.size[0]), "--rollouts", str(task_set.size[1]), "--json"]
    done = subprocess.run(
        module_command("trivet.cli.main", *words), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if not done.stdout:
        return {"error": done.stderr.strip()[-2000:]}
    report = json.loads(done.stdout)
    for policy in report["policies"]:
        policy |= {"errors": policy["errors"][:1], "num_failed": len(policy["errors"])}
        del policy["rewards"]
    return report


def train(task_set: TaskSet, args: dict[str, Any], venv: str, directory: Path, *, flags: dict[str, Any]) -> list[float]:
    """Return the mean reward of each step."""
    table = json.dumps([{"id": task_set.env_id, "venv": venv, "args": args}])
    values = {
        "--output-dir": directory,
        "--max-model-len": 2048,
        "--orchestrator.rollouts-per-example": 8,
        "--orchestrator.sampling.max-tokens": 24,
        "--orchestrator.env": table,
        **flags,
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
    for name in ("task_sets", "nemo_gym", "reasoning"):
        parser.add_argument(f"--{name.replace('_', '-')}-venv", default=name, help="a virtual environment")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--parts", nargs="+", choices=["test", "train"], default=["test", "train"])
    arguments = parser.parse_args()
    record: Path | None = arguments.record
    venvs = {name: vars(arguments)[f"{name}_venv"] for name in ("task_sets", "nemo_gym", "reasoning")} | {"auto": "auto"}
    found: dict[str, Any] = json.loads(record.read_text())["sets"] if record is not None and record.exists() else {}
    summary: dict[str, Any] = {}
    for name in arguments.sets:
        task_set, venv = SETS[name], venvs[SETS[name].venv]
        row = found.setdefault(name, {})
        with tempfile.TemporaryDirectory() as made, serve(task_set, venvs, Path(made)) as args:
            if "test" in arguments.parts:
                row |= {"test": test(task_set, args, venv)}
            if "train" in arguments.parts and task_set.is_trained:
                flags = {
                    "--model.name": arguments.model,
                    "--max-steps": arguments.steps,
                    "--ckpt.interval": arguments.steps,
                    "--orchestrator.batch-size": arguments.batch_size,
                }
                rewards = train(task_set, args, venv, Path(made) / "run", flags=flags)
                row |= {
                    "batch_size": arguments.batch_size,
                    "reward_first": round(fmean(rewards[:NUM_COMPARED]), 4),
                    "reward_last": round(fmean(rewards[-NUM_COMPARED:]), 4),
                    "rewards": [round(reward, 4) for reward in rewards],
                }
        verdict = row.get("test", {}).get("judgement", {}).get("verdict")
        print(f"{name}: verdict {verdict}, reward {row.get('reward_first')} -> {row.get('reward_last')}", flush=True)
        summary = {"bench": "task_sets", "steps": arguments.steps, "hardware": hardware(), "sets": found}
        if record is not None:
            record.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
