"""`trivet migrate`: files of prime-rl and of vf-rl, and arguments of TRL, become files of ours that mean the same."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from trivet.cli.main import main
from trivet.config.load import load_config
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.vf_rl import VfRLConfig
from trivet.dialects.vf_translation import load_run

CONFIGS = Path(__file__).parents[3] / "configs"

OLD_NAMES = """
max-steps = 20
inference_gpus = 2
trainer_gpus = 3
[environment]
id = "reverse-text"
[environment.args]
min_length = 3
[orchestrator]
rollouts_per_example = 8
batch_size = 32
[orchestrator.sampling]
max_completion_tokens = 16
[trainer.model]
impl = "auto"
ac = true
[trainer.model.experimental.lora]
rank = 8
[wandb]
id = "x"
"""
TODAYS_PRIME_RL = """
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[monitors.wandb]
project = "p"
[orchestrator]
batch_size = 128
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 512
[[orchestrator.train.source]]
name = "words"
ratio = 2.0
[orchestrator.train.source.env.taskset]
id = "reverse-text"
min_length = 3
[inference.vllm]
max_model_len = 4096
tensor_parallel_size = 2
enable_prefix_caching = true
[trainer.model]
ep = 2
tp = 2
[resume]
step = 40
"""
SCRIPT = (
    "accelerate launch --num_processes 4 grpo.py --model_name_or_path Qwen/Qwen3-0.6B --num_generations 8 --learning_rate 1e-5"
    " --per_device_train_batch_size 4 --gradient_accumulation_steps=2 --max_steps 30 --max_prompt_length 100"
    " --max_completion_length 28 --epsilon_high 0.28 --loss_type dr_grpo --scale_rewards none --beta 0.04 --no_such 1"
    " --report_to tensorboard mlflow --dataset_name words --temperature 0.9 --use_vllm"
)


def migrated(tmp_path: Path, *words: str, code: int = 0) -> tuple[str, Path]:
    """Return the text that `trivet migrate` writes, and its file."""
    output = tmp_path / "migrated.toml"
    assert main(["migrate", "--output", str(output), *words]) == code
    return output.read_text(), output


def migrated_text(tmp_path: Path, text: str, *, code: int = 0) -> tuple[str, Path]:
    source = tmp_path / "source.toml"
    source.write_text(text)
    return migrated(tmp_path, str(source), code=code)


def load_plainly(file: Path, kind: type = RLConfig) -> Any:
    """Return the configuration in a file that needs no translation."""
    loaded = load_config(kind, ["@", str(file)], environ={})
    assert not [notice for notice in loaded.notices if " called " in notice or "no effect" in notice]
    return loaded.config


@pytest.mark.parametrize("file", sorted((CONFIGS / "vf-rl").glob("*.toml")), ids=lambda file: file.stem)
def test_a_file_of_vf_rl_becomes_the_run_that_it_describes(file: Path, tmp_path: Path) -> None:
    text, output = migrated(tmp_path, str(file))
    assert load_plainly(output) == load_run(load_config(VfRLConfig, ["@", str(file)], environ={}), environ={}).config
    assert "seed = 42  # trainer.args.seed, a default" in text


def test_older_names_of_prime_rl_mean_the_same_and_are_named(tmp_path: Path) -> None:
    text, output = migrated_text(tmp_path, OLD_NAMES)
    assert load_plainly(output) == load_config(RLConfig, ["@", str(tmp_path / "source.toml")], environ={}).config
    assert "max_tokens = 16  # was orchestrator.sampling.max_completion_tokens" in text
    assert "rank = 8  # was trainer.model.experimental.lora.rank" in text
    assert '# dropped: trainer.model.impl = "auto": has no effect: models are those of transformers' in text


def test_a_file_of_todays_prime_rl_keeps_its_environments_and_its_loss(tmp_path: Path) -> None:
    text, output = migrated_text(tmp_path, TODAYS_PRIME_RL)
    run = load_plainly(output)
    (env,) = run.orchestrator.env
    assert (env.id, env.name, env.args) == ("reverse-text", "words", {"min_length": 3})
    assert (run.inference_gpu_ids, run.trainer_gpu_ids) == ([0, 1, 2, 3, 4, 5], [6, 7])
    assert (run.trainer.loss.type, run.orchestrator.rollouts_per_example, run.orchestrator.sampling.max_tokens) == (
        "dppo",
        16,
        512,
    )
    assert (run.inference.model.max_model_len, run.inference.parallel.tp, run.ckpt.resume_step) == (4096, 2, 40)
    assert run.inference.vllm_args == {"enable_prefix_caching": True}
    assert run.trainer.model.ep == 2
    assert "# dropped: trainer.model.tp = 2: does not exist here: " in text
    assert "# dropped: orchestrator.train.source.0.ratio = 2.0: does not exist here: " in text


def test_what_a_file_inherits_is_part_of_the_result(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("max_steps = 3\n[orchestrator]\ngroup_size = 2\n")
    text, output = migrated_text(tmp_path, 'toml_files = ["base.toml"]\nmax_steps = 4\n')
    assert load_plainly(output).orchestrator.rollouts_per_example == 2
    assert "max_steps = 4\n" in text
    assert "toml_files" not in text


def test_a_file_of_sft_stays_one(tmp_path: Path) -> None:
    text, output = migrated_text(tmp_path, '[data]\nname = "x.jsonl"\nnum_workers = 2\n[optim]\nlr = 1e-5\n')
    assert text.startswith("# for `uv run sft`\n# dropped: data.num_workers = 2: has no effect: ")
    assert load_plainly(output, SftConfig).data.name == "x.jsonl"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "[orchestrator]\nbatch_size = 100\ngroup_size = 16\n",
            "orchestrator.batch_size (100) must be divisible by orchestrator.rollouts_per_example (16)",
        ),
        (
            '[trainer.optim]\ntype = "sign_sgd"\n',
            "trainer.optim.type must be one of 'adamw', 'sgd', 'muon', got \"sign_sgd\" (the file)",
        ),
    ],
)
def test_values_that_cannot_be_are_left_to_a_person(
    source: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, _ = migrated_text(tmp_path, source, code=1)
    assert f"# does not load yet: {problem}" in text
    assert problem in capsys.readouterr().err
    assert source.splitlines()[1] in text


def test_the_command_line_of_a_trl_script_becomes_a_run(tmp_path: Path) -> None:
    text, output = migrated(tmp_path, *shlex.split(SCRIPT))
    run = load_plainly(output)
    assert (run.model.name, run.max_steps, run.seq_len) == ("Qwen/Qwen3-0.6B", 30, 128)
    assert (run.orchestrator.batch_size, run.orchestrator.rollouts_per_example) == (4 * 2 * 4, 8)
    assert (run.orchestrator.sampling.max_tokens, run.orchestrator.sampling.temperature) == (28, 0.9)
    loss = run.trainer.loss
    assert (loss.type, loss.clip_low, loss.clip_high, loss.beta) == ("grpo", 0.2, 0.28, 0.04)
    assert (loss.normalization, loss.normalization_length) == ("constant", 28)
    assert run.orchestrator.advantage.type == "default"
    assert run.trainer.optim.lr == 1e-5
    assert run.trainer.model.lora is None, "TRL trains all weights unless told otherwise"
    assert run.tracking.tensorboard is not None
    assert run.tracking.mlflow is not None
    assert '# dropped: dataset_name = "words": data and rewards are in the environment' in text
    assert "# dropped: no_such = 1: nothing here is like it" in text
    assert "temperature = 0.9  # was temperature" in text


@pytest.mark.parametrize(
    ("given", "loss"),
    [
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.2}, {"type": "sapo", "tau_pos": 1.0, "tau_neg": 1.2}),
        ({"loss_type": "vespo", "vespo_k_pos": 4.0}, {"type": "vespo", "k_pos": 4.0, "k_neg": 3.0, "lambda_neg": 2.0}),
        (
            {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 3e-3},
            {"type": "luspo", "clip_low": 2e-3, "clip_high": 3e-3},
        ),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"type": "cispo", "clip_high": 5.0}),
        ({"importance_sampling_level": "sequence", "epsilon": 3e-4}, {"type": "gspo", "clip_low": 3e-4, "clip_high": 3e-4}),
    ],
)
def test_losses_of_trl_keep_their_names_and_values(tmp_path: Path, given: dict[str, Any], loss: dict[str, Any]) -> None:
    (tmp_path / "grpo.json").write_text(json.dumps({"model_name_or_path": "m", "max_steps": 3, **given}))
    text, output = migrated(tmp_path, str(tmp_path / "grpo.json"))
    assert loss.items() <= load_plainly(output).trainer.loss.model_dump().items()
    assert not [line for line in text.splitlines() if "dropped" in line and ("sapo" in line or "vespo" in line)]


def test_a_file_of_arguments_is_as_good_as_a_command_line(tmp_path: Path) -> None:
    arguments = {"model_name_or_path": "m", "use_peft": True, "lora_r": 8, "learning_rate": "1e-6", "max_steps": -1}
    (tmp_path / "grpo.json").write_text(json.dumps(arguments))
    (tmp_path / "grpo.yaml").write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in arguments.items()))
    from_json, _ = migrated(tmp_path, str(tmp_path / "grpo.json"))
    from_yaml, _ = migrated(tmp_path, str(tmp_path / "grpo.yaml"))
    from_words, output = migrated(tmp_path, "trl", "grpo", "--config", str(tmp_path / "grpo.yaml"))
    assert from_json == from_yaml
    assert from_words == from_yaml
    assert load_plainly(output).trainer.model.lora.rank == 8
    assert "max_steps is unset, which is num_train_epochs in TRL" in from_yaml
