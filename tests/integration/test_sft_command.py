"""Run `sft` as its users do: a mixture with a held-out set, killed and resumed, and on two ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.evaluation.targets import read_origin
from trivet.weights.manifest import verify

STARTED_WITHIN_S = 600
NUM_STEPS = 8
KILLED = {"name": "killed", "point": "optimizer_step.during", "action": "kill", "step": 6}
"""SIGKILL ends the rank in the middle of this step."""
RANKED = ("--num-ranks", "2", "--max-steps", "4")

WORDS = {
    "short": ["ab", "cd", "ef", "gh", "ij"],
    "long": ["stone", "river", "words", "every", "night", "green", "house", "table", "cloud"],
}
CONFIG = """
max_steps = {num_steps}
model = {{ name = "{model}", compute_dtype = "float32", seq_len = 64 }}
optim = {{ lr = 3e-3 }}
ckpt = {{ interval = 2 }}

[data]
name = "mixture"
subsets = ["short", "long"]
probabilities = [0.3, 0.7]
stopping_strategy = "all_exhausted"
batch_size = 8
loss_mask = {{ user = true }}

[val]
interval = 4
eval_on_start = true
data = {{ name = "mixture/long", splits = ["train[:3]"] }}
"""


@pytest.fixture
def place(tiny_model: Path, tmp_path: Path) -> Path:
    for subset, words in WORDS.items():
        (tmp_path / "mixture" / subset).mkdir(parents=True)
        lines = (json.dumps({"prompt": word, "completion": word[::-1]}) + "\n" for word in words)
        (tmp_path / "mixture" / subset / "train.jsonl").write_text("".join(lines))
    (tmp_path / "sft.toml").write_text(CONFIG.format(model=tiny_model, num_steps=NUM_STEPS))
    return tmp_path


def start(place: Path, output: str, *flags: str) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        "-m",
        "trivet.launcher.commands.sft",
        "@",
        "sft.toml",
        "--output-dir",
        output,
        "--device",
        "cpu",
        *flags,
    ]
    with (place / f"{output}.out").open("ab") as said:
        return subprocess.Popen(command, cwd=place, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)


def finish(process: "subprocess.Popen[bytes]", place: Path, output: str) -> RunLayout:
    code = process.wait(STARTED_WITHIN_S)
    assert code == 0, (place / f"{output}.out").read_text()[-3000:]
    return RunLayout(place / output)


def series(layout: RunLayout, name: str) -> dict[int, float]:
    lines = map(json.loads, (layout.metrics / "sft.jsonl").read_text().splitlines())
    return {line["step"]: line[name] for line in lines if name in line}


@pytest.mark.core
def test_a_killed_run_goes_on_as_if_nothing_had_been_and_two_ranks_see_the_same(place: Path) -> None:
    (place / "faults.json").write_text(json.dumps({"seed": 0, "faults": [KILLED]}))
    unbroken, killed = start(place, "whole"), start(place, "broken", "--faults.schedule", "faults.json")
    broken = RunLayout(place / "broken")
    assert killed.wait(STARTED_WITHIN_S) != 0
    assert 1 <= committed_steps(broken)[-1] < KILLED["step"]
    resumed, two_ranks = start(place, "broken", "--ckpt.resume-step", "-1"), start(place, "ranked", *RANKED)
    whole = finish(unbroken, place, "whole")
    assert list(series(whole, "val/loss")) == [0, 4, 8]
    assert series(whole, "val/loss")[8] < series(whole, "val/loss")[0]
    assert series(whole, "data/epoch")[NUM_STEPS] >= 2
    assert "Step 0 | Val. Loss: " in (place / "whole.out").read_text()
    assert read_origin(whole.weights).max_steps == NUM_STEPS

    finish(resumed, place, "broken")
    for name in ("loss/mean", "val/loss", "progress/total_tokens"):
        assert series(broken, name) == series(whole, name)
    assert verify(broken.weights_step(NUM_STEPS)).digest == verify(whole.weights_step(NUM_STEPS)).digest

    ranked = finish(two_ranks, place, "ranked")
    for name in ("loss/mean", "val/loss", "optim/grad_norm"):
        expected = {step: value for step, value in series(whole, name).items() if step <= 4}
        # float32 sums in another order over four steps.
        assert series(ranked, name) == pytest.approx(expected, rel=1e-3)


def test_what_cannot_be_trained_on_is_refused_before_anything_is_started(place: Path) -> None:
    with (place / "mixture" / "long" / "train.jsonl").open("a") as file:
        file.write('{"text": "no conversation"}\n')
    process = start(place, "refused", "--dry-run")
    assert process.wait(STARTED_WITHIN_S) == 2
    said = (place / "refused.out").read_text()
    assert "record 9 of mixture long has the columns text; it needs `messages`, or `prompt` and `completion`" in said
    assert not (place / "refused").exists()
