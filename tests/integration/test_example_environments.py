"""Train the six example environments with the real vLLM: one server, and a tiny model that has learned to call tools."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.processes import heed_signals
from support.servers import ServerProcess, run_server, secret_shared
from trivet.config.layout import STABLE, RunLayout
from trivet.telemetry.events import read_events
from trivet.wire.events import Train

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
MAX_STEPS = 3
TIMEOUT_S = 1200


def run_command(*words: str | Path) -> None:
    """Run a command in the project's root. Fail with the end of its output."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"WANDB_MODE": "disabled", "OMP_WAIT_POLICY": "passive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        preexec_fn=heed_signals,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.fixture(scope="module")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the model with the commands that configs/examples/sft.toml names."""
    root = tmp_path_factory.mktemp("examples")
    data, start, warm = root / "sft.jsonl", root / "start", root / "warm"
    run_command("-m", "trivet.examples.environments_data", data)
    run_command("-m", "trivet.examples.environments_model", start, "--data", data)
    run_command(
        *("-m", "trivet.launcher.commands.sft", "@", "configs/examples/sft.toml"),
        *("--model.name", start, "--data.name", data, "--output-dir", warm),
    )
    [last] = sorted((warm / "weights").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))[-1:]
    return last


@pytest.fixture(scope="module")
def server(warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "inference.stdout"
    tools = {"model.enable-auto-tool-choice": "true", "model.tool-call-parser": "hermes"}
    with run_server(warm_model, log=log, **tools) as running, secret_shared(running):
        yield running


def train(folder: str, server: ServerProcess, output_dir: Path) -> list[dict[str, Any]]:
    """Train three steps of configs/FOLDER/cpu.toml with smaller sizes. Return the rollouts that were trained."""
    run_command(
        *("-m", "trivet.launcher.commands.rl", "@", f"configs/{folder}/cpu.toml", "--model.name", server.model),
        *("--output-dir", output_dir, "--max-steps", str(MAX_STEPS)),
        *("--orchestrator.batch-size", "16", "--orchestrator.rollouts-per-example", "4"),
        *("--trainer.model.compute-dtype", "float32"),
        *("--inference", "None", "--orchestrator.client.base-url", f"{server.base_url}/v1"),
    )
    layout = RunLayout(output_dir)
    assert [event.step for event in read_events(layout.events) if isinstance(event, Train)] == [1, 2, 3]
    assert (layout.weights_step(MAX_STEPS) / STABLE).is_file()
    files = [layout.rollouts_step(step) / "rollouts.jsonl" for step in range(1, MAX_STEPS + 1)]
    rollouts = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(rollouts) == 16 * MAX_STEPS
    return rollouts


def tool_exchanges(rollout: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """Return name, arguments and result of every call that was answered."""
    results = {message["tool_call_id"]: message["content"] for message in rollout["completion"] if message["role"] == "tool"}
    calls = [call for message in rollout["completion"] for call in message.get("tool_calls") or ()]
    return [(call["name"], json.loads(call["arguments"]), results[call["id"]]) for call in calls if call["id"] in results]


@pytest.mark.parametrize("folder", ["reverse_text", "gsm8k"])
def test_a_single_turn_environment_trains(folder: str, server: ServerProcess, tmp_path: Path) -> None:
    rollouts = train(folder, server, tmp_path)
    assert {rollout["num_turns"] for rollout in rollouts} == {1}


def test_alphabet_sort_adds_names_in_later_turns(server: ServerProcess, tmp_path: Path) -> None:
    rollouts = train("alphabet_sort", server, tmp_path)
    assert {rollout["num_turns"] for rollout in rollouts} <= {1, 2}
    second_requests = [rollout["completion"][1]["content"] for rollout in rollouts if rollout["num_turns"] == 2]
    assert second_requests
    assert all(text.startswith("Now sort these names into the list too") for text in second_requests)
    assert len({rollout["reward"] for rollout in rollouts}) > 1


def test_math_python_computes_what_the_model_wrote(server: ServerProcess, tmp_path: Path) -> None:
    rollouts = train("math_python", server, tmp_path)
    assert max(rollout["num_turns"] for rollout in rollouts) >= 2
    products = [
        (int(match[1]), match[2], int(match[3]), result)
        for rollout in rollouts
        for name, arguments, result in tool_exchanges(rollout)
        if name == "python" and (match := re.fullmatch(r"print\((\d+) ([+*]) (\d+)\)", str(arguments.get("code"))))
    ]
    assert products
    assert all(result == str(a * b if sign == "*" else a + b) for a, sign, b, result in products)


def test_wiki_search_finds_and_reads_articles(server: ServerProcess, tmp_path: Path) -> None:
    from wiki_search.world import make_world

    articles = {article.title.lower(): article.text for article in make_world().articles}
    rollouts = train("wiki_search", server, tmp_path)
    assert max(rollout["num_turns"] for rollout in rollouts) >= 3
    exchanges = [exchange for rollout in rollouts for exchange in tool_exchanges(rollout)]
    found = [result.splitlines() for name, _, result in exchanges if name == "search" and result != "Nothing found."]
    assert any(titles and {title.lower() for title in titles} <= articles.keys() for titles in found)
    read = [(str(arguments.get("title")).lower(), result) for name, arguments, result in exchanges if name == "read"]
    assert any(articles.get(title) == result for title, result in read)


def test_wordle_answers_guesses_by_the_rules(server: ServerProcess, tmp_path: Path) -> None:
    from wordle.game import mark_guess

    rollouts = train("wordle", server, tmp_path)
    assert max(rollout["num_turns"] for rollout in rollouts) == 3
    ended = re.compile(
        r"([A-Z] [A-Z] [A-Z] [A-Z] [A-Z])\n([GYX] [GYX] [GYX] [GYX] [GYX])\nNo guesses left: the word was (\w+)\."
    )
    judged = [match for rollout in rollouts if (match := ended.fullmatch(rollout["completion"][-1]["content"]))]
    assert judged
    for match in judged:
        guess, marks, secret = match[1].replace(" ", "").lower(), match[2].split(), match[3]
        assert mark_guess(guess, secret) == marks
