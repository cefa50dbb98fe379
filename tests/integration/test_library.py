"""`import trivet` on the real vLLM: a script and a notebook with functions of their own, fine-tuning, and an evaluation."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
import safetensors.numpy

from support.documents import ROOT
from support.histories import assert_proven
from trivet.config.layout import RunLayout
from trivet.history.check import check_run

FUNCTIONS = """
import verifiers as vf
from datasets import Dataset

import trivet
from trivet.trainer.losses.custom import SampleInputs, SampleLoss

VOWELS = set("aeiou")


def vowel_share(completion, **kwargs) -> float:
    text = completion[-1]["content"] or ""
    return sum(character in VOWELS for character in text) / max(len(text), 1)


def load_environment(num_examples: int = 32) -> vf.Environment:
    data = Dataset.from_list([{"question": f"say {index}", "answer": ""} for index in range(num_examples)])
    return vf.SingleTurnEnv(dataset=data, eval_dataset=data, rubric=vf.Rubric(funcs=[vowel_share]))


def reinforce(inputs: SampleInputs) -> SampleLoss:
    return SampleLoss(-(inputs.advantages_L * inputs.trainer_logprobs_L).sum(), {"mine": inputs.advantages_L})


INFERENCE = {
    "max_num_seqs": 16,
    "cpu_kv_cache_gib": 0.125,
    "model": {"dtype": "float32", "enforce_eager": True, "max_model_len": 256},
}


def arguments(max_steps=4, **others):
    return trivet.RLConfig(
        max_steps=max_steps, batch_size=8, micro_batch_size=4, rollouts_per_example=4, max_seq_len=256, max_tokens=12, bf16=False,
        learning_rate=1e-2, use_lora=False, save_steps=2, loss=reinforce, output_dir=OUTPUT, inference=INFERENCE, **others,
    )
"""

SCRIPT = (
    FUNCTIONS
    + """
trainer = trivet.RLTrainer(MODEL, load_environment, arguments(), env_args={"num_examples": 16})
for step in trainer:
    print(step.number, round(step.reward, 4), "mine/mean" in step.metrics, bool(step.rollouts[0].text), flush=True)
    if step.number == 2:
        break
trainer.save_config(CONFIG)
print(trainer.run.status.state, trainer.policy.save(SAVED).name)
"""
)
EVALUATION = (
    FUNCTIONS
    + """
measured = trivet.EvalConfig(num_examples=4, sampling={"max_tokens": 12}, output_dir=OUTPUT)
[summary] = trivet.evaluate(MODEL, load_environment, measured, inference=INFERENCE)
print(summary.env, summary.step, summary.num_examples, summary.num_failed)
"""
)
FINE_TUNING = """
import trivet
args = trivet.SFTConfig(
    max_steps=3, output_dir=OUTPUT, model={"seq_len": 64, "compute_dtype": "float32"}, data={"batch_size": 2}, optim={"lr": 1e-3}
)
trainer = trivet.SFTTrainer(MODEL, DATA, args)
print([(step.number, step.loss > 0, step.rollouts) for step in trainer], trainer.policy.version)
"""
SMALL = """max_steps=2, batch_size=8, micro_batch_size=8, rollouts_per_example=4, max_seq_len=128, max_tokens=12, bf16=False,
    inference={"max_num_seqs": 16, "cpu_kv_cache_gib": 0.125, "model": {"dtype": "float32", "enforce_eager": True}},"""
"""Arguments in place of the number of steps of the page's first example."""
AFTER_EXAMPLE = """
frame = trainer.rollouts_frame()
print(len(frame), sorted(name for name in frame.columns if name.startswith("score/")), frame["text"].str.len().gt(0).any())
"""
TEXTS = (
    FUNCTIONS
    + """
heard = []


class Heard:
    def on_evaluation(self, summary):
        heard.append(("evaluation", summary.env, summary.num_examples))

    def on_save(self, checkpoint):
        heard.append(("save", checkpoint.name))

    def on_end(self, run):
        heard.append(("end", run.status.state))


class Secret:
    wanted = "e"

    def share(self, prompts, completions, trainer_state, completion_ids, **kwargs):
        assert all(isinstance(completion, str) for completion in completions)
        assert [len(ids) <= 12 for ids in completion_ids] and trainer_state.global_step < 100
        return [text.count(self.wanted) / max(len(text), 1) for text in completions]


trainer = trivet.RLTrainer(
    MODEL,
    reward_funcs=Secret().share,
    train_dataset=[{"prompt": "once upon a time"}, {"prompt": "there was"}],
    eval_dataset=[{"prompt": "a king"}],
    args=arguments(max_steps=100, eval_strategy="steps", eval_steps=1),
    callbacks=[Heard(), lambda step: trivet.Stop if step.number == 2 else None],
)
run = trainer.train()
print(sorted({kind for kind, *_ in heard}), ("evaluation", "share", 1) in heard, heard[-1], run.steps[0].rollouts[0].prompt)
"""
)
CELLS = [
    FUNCTIONS,
    "trainer = trivet.RLTrainer(MODEL, load_environment, arguments())",
    """
for step in trainer:
    print(step.number, bool(step.rollouts[0].text))
    if step.number == 2:
        raise RuntimeError("no more")
""",
    "print(trainer._process.is_running, trainer.run.status.state, len(trainer.run.steps) >= 2)",
]


def names(**values: Path) -> str:
    return "".join(f"{name} = {str(value)!r}\n" for name, value in values.items())


def run_script(tmp_path: Path, script: str) -> list[str]:
    file = tmp_path / "train.py"
    file.write_text(script)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=900, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.vllm
def test_a_script_trains_with_its_own_functions_and_the_command_resumes_it(tmp_path: Path, tiny_model: Path) -> None:
    layout = RunLayout(tmp_path / "outputs")
    config, saved = tmp_path / "run.toml", tmp_path / "saved"
    printed = run_script(tmp_path, names(MODEL=tiny_model, OUTPUT=layout.root, CONFIG=config, SAVED=saved) + SCRIPT)
    assert [line.split()[0] for line in printed[:2]] == ["1", "2"]
    assert all(line.endswith("True True") for line in printed[:2])
    assert printed[2:] == ["interrupted saved"]
    assert (saved / "model.safetensors").exists()
    command = [sys.executable, "-P", "-m", "trivet.launcher.commands.rl", "@", str(config), "--trainer.ckpt.resume-step", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert assert_proven(check_run(layout)).last_step == 4


@pytest.mark.vllm
def test_the_first_example_of_the_page_trains_an_adapter_and_saves_it_merged(tmp_path: Path, tiny_model: Path) -> None:
    [example, *_] = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/python.md").read_text(), re.MULTILINE | re.DOTALL)
    start = tmp_path / "outputs/quickstart/sft/weights/step_100"
    shutil.copytree(tiny_model, start)
    assert "max_steps=100," in example
    printed = run_script(tmp_path, example.replace("max_steps=100,", SMALL) + AFTER_EXAMPLE)
    assert printed[-1] == "16 ['score/asks_nothing', 'score/brevity', 'score/num_turns'] True"
    assert not (tmp_path / "my-model/adapter_config.json").exists()
    saved, before = (safetensors.numpy.load_file(path / "model.safetensors") for path in (tmp_path / "my-model", start))
    assert saved.keys() == before.keys()
    assert any((saved[name] != before[name]).any() for name in saved)
    assert_proven(check_run(RunLayout(tmp_path / "outputs/brevity")))


@pytest.mark.vllm
def test_plain_texts_are_continued_and_a_callback_ends_the_run(tmp_path: Path, tiny_model: Path) -> None:
    layout = RunLayout(tmp_path / "outputs")
    [printed] = run_script(tmp_path, names(MODEL=tiny_model, OUTPUT=layout.root) + TEXTS)
    prompt = [{"role": "text", "content": "once upon a time"}], [{"role": "text", "content": "there was"}]
    expected = "['end', 'evaluation', 'save'] True ('end', <RunState.INTERRUPTED: 'interrupted'>)"
    assert printed in [f"{expected} {messages}" for messages in prompt]
    assert assert_proven(check_run(layout)).last_step >= 2


@pytest.mark.vllm
def test_a_cell_that_fails_ends_the_run_of_a_notebook(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    cells = [names(MODEL=tiny_model, OUTPUT=tmp_path / "outputs"), *CELLS]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [[output for output in cell.outputs if output.get("name") != "stderr"] for cell in notebook.cells]
    assert [output.get("ename") for output in outputs[3] if output.output_type == "error"] == ["RuntimeError"], outputs
    text = "".join(output.text for output in outputs[3] if output.output_type == "stream")
    assert text.splitlines()[:2] == ["1 True", "2 True"]
    [bar] = [output.data["text/plain"] for output in outputs[3] if output.output_type == "display_data"]
    assert "step 2/4: reward=" in bar
    assert outputs[4][0].text == "False interrupted True\n"


@pytest.mark.vllm
def test_a_model_is_evaluated_on_a_server_of_its_own(tmp_path: Path, tiny_model: Path) -> None:
    printed = run_script(tmp_path, names(MODEL=tiny_model, OUTPUT=tmp_path / "outputs") + EVALUATION)
    assert printed == ["train 0 4 0"]


@pytest.mark.core
def test_fine_tuning_yields_its_steps(tmp_path: Path, tiny_model: Path) -> None:
    data = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "say a"}, {"role": "assistant", "content": "aaa"}]}
    data.write_text(f"{json.dumps(row)}\n" * 8)
    printed = run_script(tmp_path, names(MODEL=tiny_model, OUTPUT=tmp_path / "outputs", DATA=data) + FINE_TUNING)
    assert printed == ["[(1, True, []), (2, True, []), (3, True, [])] 3"]
