from collections.abc import Iterator
from pathlib import Path

import pytest

from trivet.config.dump import to_toml
from trivet.config.load import load_config
from trivet.config.schema.losses import DefaultLossConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.trainer import ConstantSchedule, CosineSchedule, LinearSchedule
from trivet.config.schema.vf_rl import VfRLConfig, VfTrainerArgs
from trivet.dialects.vf_translation import RUN_NAMES, load_run
from trivet.errors import ConfigError
from trivet.key_names import key_name, use_names

BASE = """
model = "Qwen/Qwen3-4B-Instruct-2507"

[env]
id = "kalomaze/alphabet-sort"

[inference]
gpus = 1

[inference.args]
enforce_eager = true

[trainer]
gpus = 1

[trainer.args]
"""

OTHER_VALUES: dict[str, str] = {
    "run_name": '"another"',
    "output_dir": '"elsewhere"',
    "overwrite_output_dir": "true",
    "use_lora": "false",
    "lora_rank": "8",
    "lora_alpha": "64.0",
    "lora_dropout": "0.1",
    "lora_target_modules": '["q_proj"]',
    "lora_use_rslora": "true",
    "learning_rate": "3e-5",
    "lr_scheduler_type": '"cosine"',
    "warmup_steps": "5",
    "warmup_ratio": "0.1",
    "weight_decay": "0.1",
    "adam_beta1": "0.8",
    "adam_beta2": "0.95",
    "adam_epsilon": "1e-6",
    "max_grad_norm": "0.5",
    "bf16": "false",
    "gradient_checkpointing": "true",
    "micro_batch_size": "16",
    "batch_size": "256",
    "rollouts_per_example": "8",
    "max_steps": "7",
    "max_seq_len": "1024",
    "max_prompt_len": "512",
    "max_tokens": "100",
    "temperature": "1.0",
    "top_p": "0.9",
    "top_k": "50",
    "min_p": "0.1",
    "repetition_penalty": "1.1",
    "presence_penalty": "0.1",
    "frequency_penalty": "0.1",
    "mask_ratio_low": "0.2",
    "mask_ratio_high": "5.0",
    "mask_truncated_completions": "true",
    "zero_truncated_completions": "true",
    "beta": "0.1",
    "sync_ref_model": "true",
    "num_iterations": "2",
    "num_batches_ahead": "0",
    "max_concurrent": "64",
    "generation_timeout": "100.0",
    "seed": "7",
    "eval_strategy": '"steps"',
    "save_strategy": '"no"',
    "save_steps": "10",
    "save_total_limit": "2",
    "resume_from_checkpoint": "true",
    "log_completions": "false",
    "num_completions_to_print": "5",
    "report_to": '"wandb"',
    "wandb": '{ project = "mine" }',
    "vllm_server_host": '"0.0.0.0"',
    "vllm_server_port": "8001",
    "vllm_server_timeout": "600.0",
}
"""A value other than the default for each key that changes the run by itself."""
NEEDS = {
    "warmup_steps": 'lr_scheduler_type = "linear"\n',
    "warmup_ratio": 'lr_scheduler_type = "linear"\n',
    "sync_ref_model": "beta = 0.1\n",
}
ELSEWHERE = {
    "lora_modules_to_save": "is refused: servers cannot load them",
    "logging_steps": "the command's own lines",
    "eval_steps": "only with eval_strategy",
    "ref_model_sync_steps": "only with sync_ref_model",
    "mask_env_responses": "has one value",
}


@pytest.fixture(autouse=True)
def users_names() -> Iterator[None]:
    with use_names(RUN_NAMES):
        yield


def translated(tmp_path: Path, text: str) -> tuple[RLConfig, str]:
    """Return the run and every message about it."""
    file = tmp_path / "vf.toml"
    file.write_text(text)
    loaded = load_run(load_config(VfRLConfig, ["@", str(file)], environ={}), environ={})
    return loaded.config, "\n".join(loaded.notices)


def test_the_documented_example_becomes_a_run(tmp_path: Path) -> None:
    run, _ = translated(
        tmp_path,
        BASE + 'run_name = "sorting"\nuse_lora = true\nlearning_rate = 1e-5\nmicro_batch_size = 4\nrollouts_per_example = 16\n'
        "batch_size = 512\nmax_steps = 100\nmax_tokens = 512\nmax_seq_len = 2048\n",
    )
    assert run.output_dir == Path("outputs/sorting")
    assert run.model.name == "Qwen/Qwen3-4B-Instruct-2507"
    assert [(env.id, env.args) for env in run.orchestrator.env] == [("kalomaze/alphabet-sort", {})]
    assert (run.inference_gpu_ids, run.trainer_gpu_ids) == ([0], [1])
    assert run.inference is not None
    assert run.inference.model.enforce_eager
    assert run.inference.enable_lora
    assert (run.orchestrator.batch_size, run.orchestrator.rollouts_per_example) == (512, 16)
    assert run.orchestrator.sampling.max_tokens == 512
    assert run.trainer.model.seq_len == run.orchestrator.seq_len == run.inference.model.max_model_len == 2048
    assert run.max_steps == run.trainer.max_steps == 100


def test_defaults_are_the_documented_ones(tmp_path: Path) -> None:
    run, _ = translated(tmp_path, BASE)
    lora = run.trainer.model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha) == (16, 16.0)
    assert set(lora.target_modules) == {"q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "up_proj"}
    assert run.trainer.optim.lr == 1e-5
    assert run.orchestrator.sampling.temperature == 0.7
    assert (run.orchestrator.batch_size, run.orchestrator.rollouts_per_example, run.max_steps) == (512, 16, 500)
    assert isinstance(run.trainer.scheduler, ConstantSchedule)
    assert isinstance(run.trainer.loss, DefaultLossConfig)
    assert (run.trainer.loss.token_mask_low, run.trainer.loss.token_mask_high) == (0.125, 8.0)


def test_every_key_of_the_trainer_is_accounted_for() -> None:
    assert set(OTHER_VALUES) | set(ELSEWHERE) == set(VfTrainerArgs.model_fields)


@pytest.mark.parametrize("name", sorted(OTHER_VALUES))
def test_each_key_changes_the_run_or_is_answered(tmp_path: Path, name: str) -> None:
    before, said_before = translated(tmp_path, BASE + NEEDS.get(name, ""))
    after, said = translated(tmp_path, f"{BASE}{NEEDS.get(name, '')}{name} = {OTHER_VALUES[name]}\n")
    assert to_toml(after) != to_toml(before) or (name in said and name not in said_before)


def test_keys_of_the_older_trainer_are_named_by_todays_or_said_to_have_no_effect(tmp_path: Path) -> None:
    _, said = translated(tmp_path, f"{BASE}num_generations = 8\ngradient_accumulation_steps = 4\n")
    assert "trainer.args.num_generations is called trainer.args.rollouts_per_example here" in said
    assert "trainer.args.gradient_accumulation_steps" in said
    assert "has no effect" in said


def test_arguments_of_the_server_reach_it(tmp_path: Path) -> None:
    arguments = 'dtype = "float32"\n"tensor-parallel-size" = 2\nmax_model_len = 4096\nswap_space = 1\n'
    run, _ = translated(tmp_path, BASE.replace("gpus = 1", "gpus = 2", 1).replace("enforce_eager = true\n", arguments))
    assert run.inference is not None
    assert (run.inference.model.dtype, run.inference.parallel.tp, run.inference.model.max_model_len) == ("float32", 2, 4096)
    assert run.inference.vllm_args == {"swap_space": 1}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ('lr_scheduler_type = "linear"\nwarmup_ratio = 0.1\n', LinearSchedule(warmup_steps=10, decay_steps=90)),
        ('lr_scheduler_type = "constant_with_warmup"\nwarmup_steps = 10\n', LinearSchedule(warmup_steps=10, decay_steps=0)),
        ('lr_scheduler_type = "cosine"\nwarmup_steps = 10\n', CosineSchedule(warmup_steps=10)),
    ],
)
def test_schedules_keep_their_course(tmp_path: Path, schedule: str, expected: LinearSchedule | CosineSchedule) -> None:
    run, _ = translated(tmp_path, f"{BASE}max_steps = 100\n{schedule}")
    assert run.trainer.scheduler == expected


def test_a_variable_comes_before_the_dialects_defaults_and_after_what_is_written(tmp_path: Path) -> None:
    def lr(text: str, **environ: str) -> float:
        (tmp_path / "vf.toml").write_text(BASE + text)
        loaded = load_config(VfRLConfig, ["@", str(tmp_path / "vf.toml")], environ=environ)
        return load_run(loaded, environ=environ).config.trainer.optim.lr

    assert lr("", TRIVET_TRAINER__OPTIM__LR="0.5") == 0.5
    assert lr("", TRIVET_TRAINER__ARGS__LEARNING_RATE="0.25") == 0.25
    assert lr("learning_rate = 0.125\n", TRIVET_TRAINER__OPTIM__LR="0.5", TRIVET_TRAINER__ARGS__LEARNING_RATE="0.25") == 0.125
    of_another_command = {"TRIVET_TRAINER__ARGS__LEARNING_RATE": "0.25"}
    assert (
        load_config(RLConfig, ["--orchestrator.rollouts-per-example", "2"], environ=of_another_command).config.trainer.optim.lr
        == 1e-6
    )
    (tmp_path / "vf.toml").write_text(BASE)
    loaded = load_config(VfRLConfig, ["@", str(tmp_path / "vf.toml")], environ={"TRIVET_MODEL": "other/model"})
    assert load_run(loaded, environ={"TRIVET_MODEL": "other/model"}).config.model.name != "other/model", "the file says it"
    with pytest.raises(ConfigError, match=r"unknown key trainer\.args"):
        lr("", TRIVET_TRAINER__ARGS__LERNING_RATE="0.25")


def test_policies_are_measured_as_they_are_trained(tmp_path: Path) -> None:
    run, _ = translated(tmp_path, f'{BASE}eval_strategy = "steps"\ntemperature = 0.7\nmax_tokens = 32\ntop_p = 0.9\n')
    assert run.orchestrator.eval is not None
    sampling = run.orchestrator.eval.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.top_p) == (0.7, 32, 0.9)


def test_a_checkpoint_is_resumed_by_its_name(tmp_path: Path) -> None:
    run, _ = translated(tmp_path, f'{BASE}resume_from_checkpoint = "outputs/x/checkpoint-50"\n')
    assert run.trainer.ckpt.resume_step == 50


@pytest.mark.parametrize(
    ("words", "step"), [(["checkpoint-5"], 5), (["true"], -1), ([], -1), (["--trainer.args.max-steps", "9"], -1)]
)
def test_the_flag_that_resumes_takes_a_name_or_stands_alone(tmp_path: Path, words: list[str], step: int) -> None:
    file = tmp_path / "vf.toml"
    file.write_text(BASE)
    flag = ["--trainer.args.resume-from-checkpoint", *words]
    for argv in (["@", str(file), *flag], [*flag, "@", str(file)]):
        run = load_run(load_config(VfRLConfig, argv, environ={}), environ={}).config
        assert run.trainer.ckpt.resume_step == step
    off = load_config(VfRLConfig, ["@", str(file), *flag, "--no-trainer.args.resume-from-checkpoint"], environ={})
    assert off.config.trainer.args.resume_from_checkpoint is False


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("batch_size = 512\nmicro_batch_size = 24\n", r"512 % 24 = 8; try batch_size = 504"),
        (
            "batch_size = 8\nrollouts_per_example = 3\nmicro_batch_size = 8\n",
            r"trainer\.args\.batch_size \(8\) must be divisible by trainer\.args\.rollouts_per_example \(3\)",
        ),
        ("max_tokens = 2048\n", r"trainer\.args\.max_tokens \(2048\) must be < trainer\.args\.max_seq_len \(2048\)"),
        ("rollouts_per_example = 8\nnum_generations = 4\n", "num_generations .* and trainer.args.rollouts_per_example"),
        ('resume_from_checkpoint = "latest"\n', "must be true, false, or end with checkpoint-N"),
        ("lerning_rate = 1.0\n", "did you mean trainer.args.learning_rate"),
        ('report_to = "comet"\n', 'knows "wandb", "tensorboard", "trackio", "mlflow", "opentelemetry" and "none"'),
        ('lora_modules_to_save = ["norm"]\n', "modules_to_save"),
        ("mask_env_responses = false\n", r"no log-probability to weigh it by; .* data\.loss_mask\.tool = true"),
        ("fp16 = true\n", "unknown key trainer.args.fp16"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translated(tmp_path, BASE + lines)


def test_a_problem_with_a_variable_of_the_run_names_the_keys_of_the_dialect(tmp_path: Path) -> None:
    (tmp_path / "vf.toml").write_text(BASE.replace("enforce_eager = true", "max_loras = 4"))
    loaded = load_config(VfRLConfig, ["@", str(tmp_path / "vf.toml")], environ={})
    with pytest.raises(ConfigError) as caught:
        load_run(loaded, environ={"TRIVET_INFERENCE__MAX_CPU_LORAS": "2"})
    assert str(caught.value).startswith("inference.args.max_cpu_loras (2) must be >= inference.args.max_loras (4)")


def test_a_value_that_is_spelled_like_a_key_of_the_run_stays(tmp_path: Path) -> None:
    _, said = translated(tmp_path, BASE.replace("kalomaze/alphabet-sort", "orchestrator.batch_size/seq_len"))
    assert 'env.id "orchestrator.batch_size/seq_len": the package seq_len of this machine is used' in said


def test_the_keys_that_every_file_needs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        translated(tmp_path, 'model = "m"\n')
    for name in ("env", "inference", "trainer"):
        assert f"{name} is missing" in str(caught.value)


def test_a_file_that_cannot_be_read_is_the_only_complaint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(VfRLConfig, ["@", str(tmp_path / "nowhere.toml")], environ={})
    assert str(caught.value) == f"{tmp_path / 'nowhere.toml'} cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("--trainer.ckpt.resume-step -1", "--trainer.args.resume-from-checkpoint true"),
        ("--clean", "--trainer.args.overwrite-output-dir true"),
        ("ckpt.resume_step = -1", "trainer.args.resume_from_checkpoint = true"),
        ("orchestrator.sampling.max_tokens", "trainer.args.max_tokens"),
        ("inference.parallel.tp", "inference.args.tensor_parallel_size"),
        ("orchestrator.buffer.type", "orchestrator.buffer.type"),
    ],
)
def test_messages_of_the_runs_processes_name_the_keys_of_the_dialect(key: str, name: str) -> None:
    assert key_name(key) == name


def test_wandb_gets_samples_at_every_logged_step(tmp_path: Path) -> None:
    def extras(lines: str) -> tuple[int, bool]:
        run, _ = translated(tmp_path, BASE + lines)
        assert run.orchestrator.wandb is not None
        assert run.orchestrator.wandb.log_extras is not None
        return run.orchestrator.wandb.log_extras.interval, run.orchestrator.wandb.log_extras.samples

    assert extras('report_to = "wandb"\n') == (1, True)
    assert extras('report_to = "wandb"\nlogging_steps = 5\nlog_completions = false\n') == (5, False)


@pytest.mark.parametrize("env_id", ["kalomaze/alphabet-sort@0.1.2", "alphabet_sort==0.1.2"])
def test_an_id_with_a_version_names_the_environment_without_it(tmp_path: Path, env_id: str) -> None:
    file = tmp_path / "vf.toml"
    file.write_text(BASE.replace("kalomaze/alphabet-sort", env_id))
    config = load_run(load_config(VfRLConfig, ["@", str(file)], environ={}), environ={}).config
    [env] = config.orchestrator.env
    assert (env.id, env.label.replace("_", "-")) == (env_id, "alphabet-sort")
