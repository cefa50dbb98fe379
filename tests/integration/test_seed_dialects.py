"""Configurations of verifiers' trainer and of prime-rl start, train three steps and end on this machine.

Only the model's path, the environment and sizes are changed. Every other key is as their guides write it.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.processes import wait_until
from support.rl_run import ENVIRONMENTS, Run
from support.terminals import Terminal, tmux_sockets
from trivet.config.layout import STABLE, RunLayout

pytestmark = pytest.mark.vllm

MAX_STEPS = 3
VF = """
model = "{model}"

[env]
id = "kalomaze/vowels"

[inference]
gpus = 1

[inference.args]
enforce_eager = true
{server}
[trainer]
gpus = 1

[trainer.args]
run_name = "vowels"
micro_batch_size = 4
rollouts_per_example = 4
batch_size = 16
max_steps = 3
max_tokens = 12
max_seq_len = 128
vllm_server_timeout = 600.0
{more}
"""
LORA = "use_lora = true\nlearning_rate = 1e-5\n"
TUTORIAL = """use_lora = false
learning_rate = 1e-6
lr_scheduler_type = "cosine"
warmup_steps = 1
temperature = 0.8
top_p = 0.9
gradient_checkpointing = true
save_steps = 2
report_to = "wandb"

[trainer.args.wandb]
project = "reverse-text-tutorial"
name = "my-first-run"
offline = true
"""
PRIME = """
inference_gpu_ids = [0, 1, 2]
trainer_gpu_ids = [3]
max_steps = {max_steps}
seq_len = 128
output_dir = "{output_dir}"

[model]
name = "{model}"

[trainer.optim]
lr = 1e-5
weight_decay = 0.0

[trainer.tokenizer]
name = "{model}"

[trainer.model.ac]
freq = 1

[trainer.model.lora]
rank = 32
alpha = 32
dropout = 0.05
target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

[trainer.ckpt]
interval = 10
keep_last = 3
keep_interval = 50

[orchestrator]
batch_size = 16
rollouts_per_example = 4
oversampling_factor = 2.0

[orchestrator.sampling]
max_tokens = 12
temperature = 0.5

[orchestrator.buffer]
online_difficulty_filtering = true

[[orchestrator.env]]
id = "vowels"

[inference]
gpu_memory_utilization = 0.6

[inference.model]
name = "{model}"
enable_auto_tool_choice = true
tool_call_parser = "hermes"
max_model_len = 128
"""


@pytest.fixture
def sockets() -> Iterator[str]:
    with tmux_sockets() as directory:
        yield directory


def write(directory: Path, model: Path, *, more: str, server: str = "") -> Path:
    file = directory / "vf.toml"
    file.write_text(VF.format(model=model, more=more, server=server))
    return file


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_vf_rl_attaches_to_its_session_runs_and_ends_with_the_trainings_exit_code(
    tmp_path: Path, tiny_model: Path, sockets: str
) -> None:
    file = write(tmp_path, tiny_model, more=LORA)
    terminal = Terminal(
        tmp_path,
        sockets,
        [sys.executable, "-m", "trivet.dialects.vf_rl", "@", str(file), "-s", "mine"],
        {"PYTHONPATH": str(ENVIRONMENTS), "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"},
    )
    wait_until(
        lambda: terminal.tmux("list-clients", "-t", "mine") != "" or terminal.process.poll() is not None,
        timeout_s=480,
        waiting_for="vf-rl attaching",
    )
    assert terminal.tmux("list-panes", "-t", "mine", "-F", "#{pane_title}").split() == ["inference", "trainer"]
    assert terminal.wait(1200) == 0, terminal.text[-4000:]
    assert "Step 3/3: reward=" in terminal.text
    assert terminal.tmux("list-sessions") == ""
    root = tmp_path / "outputs" / "vowels"
    written = {path.name for path in (root / "checkpoint-3").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "trainer_state.json"} <= written
    state = json.loads((root / "checkpoint-3" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"]] == [1, 2, 3]
    assert (RunLayout(root).weights_step(3) / STABLE).exists()


@pytest.mark.core
def test_the_tutorials_keys_train_all_weights_without_tmux(tmp_path: Path, tiny_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trivet.dialects.vf_rl", "@", str(write(tmp_path, tiny_model, more=TUTORIAL)), "--no-tmux"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ENVIRONMENTS), "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for said in (
        "Loading model",
        "vLLM server is ready",
        "Loading environment kalomaze/vowels...",
        "Step 1/3: reward=",
        "'loss'",
    ):
        assert said in done.stdout
    root = tmp_path / "outputs" / "vowels"
    assert sorted(path.name for path in root.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    assert (root / "checkpoint-2" / "model.safetensors").exists()


def test_the_guides_configuration_of_prime_rl_trains(make_run: Callable[..., Run]) -> None:
    run = make_run(max_steps=MAX_STEPS, template=PRIME)
    run.start()
    assert run.await_exit() == 0, run.output[-4000:]
    assert f"SUCCESS Step {MAX_STEPS} " in run.output
    assert (run.layout.weights_step(MAX_STEPS) / "adapter_config.json").exists()
