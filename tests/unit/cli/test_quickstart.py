import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import descendants_of, still_alive
from trivet.cli.quickstart import (
    Children,
    QuickstartLayout,
    choose_layout,
    eval_command,
    report,
    rl_command,
    sft_command,
)
from trivet.config.layout import STABLE, RunLayout
from trivet.errors import ConfigError, RoleFailed
from trivet.process.signals import Interrupts

CONFIGS = Path("configs/quickstart")


@pytest.fixture
def layout(tmp_path: Path) -> QuickstartLayout:
    return QuickstartLayout(tmp_path)


@pytest.fixture
def children() -> Iterator[Children]:
    with Interrupts(clock=time.monotonic) as interrupts:
        yield Children(environ=os.environ, interrupts=interrupts)


def publish(layout: RunLayout, *steps: int) -> None:
    for step in steps:
        layout.weights_step(step).mkdir(parents=True)
        (layout.weights_step(step) / STABLE).touch()


def value_of(flag: str, command: list[str]) -> str:
    return command[command.index(flag) + 1]


def test_each_phase_starts_from_the_last_weights_of_the_one_before(layout: QuickstartLayout) -> None:
    publish(layout.warm_up, 9, 150)
    publish(layout.run, 40, 50)
    warm_up = list(sft_command(layout, CONFIGS, seed=3))
    assert value_of("--model.name", warm_up) == str(layout.start_model)
    assert value_of("--data.name", warm_up) == str(layout.data)
    assert value_of("--seed", warm_up) == "3"
    assert value_of("--model.name", list(rl_command(layout, CONFIGS, seed=3))) == str(layout.root / "sft/weights/step_150")
    measured = list(eval_command(layout, CONFIGS, port=8123))
    assert value_of("--steps", measured) == "50"
    assert value_of("--client.base-url", measured) == "http://127.0.0.1:8123/v1"


def test_a_warm_up_without_weights_is_refused_by_name(layout: QuickstartLayout) -> None:
    with pytest.raises(ConfigError, match="sft/weights has no published weights"):
        rl_command(layout, CONFIGS, seed=0)


def test_threads_sleep_while_they_wait_and_a_width_of_the_user_wins() -> None:
    environment = Children(environ={"COLUMNS": "80", "OMP_WAIT_POLICY": "active"}, interrupts=Interrupts()).environ
    assert environment["COLUMNS"] == "80"
    assert environment["OMP_WAIT_POLICY"] == "passive"


def test_the_exit_code_is_that_of_the_process(children: Children) -> None:
    assert children.run("json.tool", "/nowhere") != 0
    assert children.run("platform") == 0


def test_a_signal_is_passed_on_and_counted_as_a_shell_counts_it(children: Children) -> None:
    waits = iter([lambda: os.kill(os.getpid(), signal.SIGTERM)])
    assert children.run("http.server", "0", watch=lambda: next(waits, lambda: None)()) == 143


def test_what_the_watch_raises_ends_the_process(children: Children) -> None:
    def watch() -> None:
        raise RoleFailed("the inference server ended")

    others = descendants_of(os.getpid())  # a server that other tests of this process share
    with pytest.raises(RoleFailed):
        children.run("http.server", "0", watch=watch)
    assert not still_alive([process for process in descendants_of(os.getpid()) if process not in others])


def test_output_goes_to_a_log_where_one_is_named(children: Children, tmp_path: Path) -> None:
    assert children.start("platform", log=tmp_path / "log").wait(60) == 0
    assert "Linux" in (tmp_path / "log").read_text()


def test_a_second_quickstart_leaves_the_first_ones_results_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "quickstart-2"):
        layout = choose_layout(None)
        assert layout.root == Path("outputs", name)
        layout.start_model.mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds the results of an earlier quickstart; give another directory"):
        choose_layout(Path("outputs/quickstart"))
    assert choose_layout(tmp_path / "new").root == tmp_path / "new"


def evaluation(directory, *, step: int, avg: float, answer: str) -> None:
    place = directory / f"step_{step}" / "reverse-text"
    place.mkdir(parents=True)
    (place / "summary.json").write_text(json.dumps({"step": step, "avg": avg, "pass_at_k": avg}))
    row = {"prompt": [{"content": "abc"}], "completion": [{"content": answer}], "reward": avg}
    (place / "results.jsonl").write_text(json.dumps(row) + "\n")


@pytest.fixture
def output(tmp_path):
    metrics = tmp_path / "run" / "metrics"
    metrics.mkdir(parents=True)
    rows = [{"step": step, "reward/mean": step / 20} for step in range(20, 0, -1)]
    (metrics / "orchestrator.jsonl").write_text("\n".join(json.dumps(row) for row in [*rows, {"step": 0}]))
    evaluation(tmp_path / "run" / "evals", step=20, avg=0.91, answer="cba")
    evaluation(tmp_path / "run" / "evals", step=0, avg=0.42, answer="abc")
    return tmp_path


def test_the_report_compares_the_start_model_with_the_last_policy(output):
    text = report(output)
    for start, numbers in (("reward, first", ["0.150", "0.900"]), ("reward on held-out", ["0.420", "0.910"])):
        [line] = [line for line in text.splitlines() if line.startswith(start)]
        assert line.split()[-2:] == numbers
    assert text.index("abc        -> abc") < text.index("abc        -> cba")
    assert str(output / "run" / "weights" / "step_20") in text
