"""Arguments are checked where they are written, and become the configuration of a run."""

import functools
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from trivet.config.schema.losses import CustomLossConfig, GrpoLossConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.config.schema.vf_rl import VfTrainerArgs
from trivet.errors import ConfigError, EnvironmentLoadError
from trivet.key_names import key_name, use_names
from trivet.library.arguments import (
    RUN_KEYS,
    EvalArguments,
    RLArguments,
    SFTArguments,
    entries_of,
    name_of_environment,
    plan_run,
    plan_sft,
    written_values,
)
from trivet.library.process import PYTHON_NAMES
from trivet.library.trainers import RLTrainer
from trivet.process.imports import file_of

OTHERWISE = {
    "output_dir": "output_dir of the dialect",
    "clean": "overwrite_output_dir",
    "max_steps": "max_steps of the dialect",
    "seq_len": "max_seq_len",
    "max_async_level": "num_batches_ahead",
    "seed": "seed of the dialect",
    "model": "the trainer's first argument",
    "wandb": "wandb of the dialect",
    "bench": "measures no run",
    "faults": "for tests of endurance",
    "deployment": "a program of Python leads no nodes",
    "kubernetes": "writes a command as a manifest, and a program of Python is none",
    "skypilot": "writes a command as a task, and a program of Python is none",
    "slurm": "submits a command, and a program of Python is none",
}
"""Keys of a run that `RLArguments` has under another name, or not."""


def test_every_key_of_a_run_can_be_given() -> None:
    assert RLConfig.model_fields.keys() - OTHERWISE.keys() == RUN_KEYS
    assert RUN_KEYS.isdisjoint(VfTrainerArgs.model_fields)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_step": 3}, r"unknown key max_step \(RLConfig\); did you mean max_steps\?"),
        ({"los": "grpo"}, r"did you mean loss\?"),
        ({"trainer": {"optm": {"lr": 1}}}, r"unknown key trainer\.optm .*did you mean trainer\.optim\?"),
        ({"top_k": "x"}, 'top_k must be a whole number, got "x"'),
        ({"temperatur": 1, "max_steps": 0}, r"(?s)2 problems.*temperature.*max_steps must be >= 1, got 0"),
        ({"gradient_accumulation_step": 1}, "unknown key gradient_accumulation_step"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_nearest_one(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RLArguments(**values)


def test_older_names_of_the_dialect_are_said_in_todays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        args = RLArguments(num_generations=4, gradient_accumulation_steps=2)
    assert args.model_fields_set == {"rollouts_per_example"}
    assert args.rollouts_per_example == 4
    assert "notice: num_generations is called rollouts_per_example here (RLConfig)" in caplog.text
    assert "notice: gradient_accumulation_steps (RLConfig) has no effect" in caplog.text


def test_sections_are_models_or_tables() -> None:
    args = RLArguments(trainer=TrainerConfig(num_iterations=2), ckpt={"keep_last": 3}, inference=None)
    entries = {entry.path: entry.value for entry in entries_of(written_values(args), origin="RLConfig")}
    assert entries == {("trainer", "num_iterations"): 2, ("ckpt", "keep_last"): 3, ("inference",): "None"}


def test_a_section_keeps_its_type_which_says_what_its_keys_mean() -> None:
    assert written_values(GrpoLossConfig(clip_high=0.3)) == {"type": "grpo", "clip_high": 0.3}


def test_the_other_arguments_are_checked_too() -> None:
    assert SFTArguments(data={"name": "x.jsonl"}).data.name == "x.jsonl"
    with pytest.raises(ConfigError, match=r"unknown key max_stepps \(SFTConfig\); did you mean max_steps\?"):
        SFTArguments(max_stepps=1)
    with pytest.raises(ConfigError, match=r"num_example.*did you mean num_examples\?"):
        EvalArguments(num_example=1)


SOURCE = """
def my_loss(inputs, *, scale=1.0): ...
def my_advantage(inputs): ...
def load_environment(n=1, m=1): ...
def load_my_env(): ...
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user's own."""
    file = tmp_path / "users_functions.py"
    file.write_text(SOURCE)
    module = ModuleType("users_functions")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(SOURCE, file, "exec"), module.__dict__)
    return module


def test_the_defaults_are_those_of_the_dialect() -> None:
    config = plan_run("models/x", "reverse-text", RLArguments(), env_args={"a": 1}).config
    assert (config.max_steps, config.orchestrator.batch_size, config.trainer.model.lora is None) == (500, 512, False)
    assert config.output_dir == Path("outputs/reverse-text")
    assert (config.orchestrator.env[0].id, config.orchestrator.env[0].args) == ("reverse-text", {"a": 1})
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ([0], [1])


def test_sections_lie_over_the_dialect(functions: ModuleType) -> None:
    args = RLArguments(
        max_steps=7, loss="grpo", advantage={"type": "rloo"}, ckpt={"keep_last": 2}, trainer={"num_iterations": 2}
    )
    config = plan_run("models/x", "reverse-text", args, env_args={}).config
    assert isinstance(config.trainer.loss, GrpoLossConfig)
    assert (config.orchestrator.advantage.type, config.trainer.ckpt.keep_last, config.trainer.num_iterations) == ("rloo", 2, 2)


@pytest.mark.parametrize(
    "values",
    [
        {"deterministic": True},
        {"loss": "ipo", "beta": 0.1},
        {"loss": {"adv_tau": 0.5}, "mask_ratio_high": 4.0},
        {"advantage": "None", "eval_strategy": "steps", "wandb": {"project": "p"}},
        {"inference": None, "orchestrator": {"client": {"base_url": ["http://127.0.0.1:8000/v1"]}}},
        {"inference_gpu_ids": [0, 1], "trainer_gpu_ids": [2, 3], "trainer": {"optim": {"type": "muon"}}},
    ],
)
def test_dialect_and_sections_go_together(values: dict[str, object]) -> None:
    args = RLArguments(**values)
    config = plan_run("models/x", "reverse-text", args, env_args={}).config
    assert config.deterministic == (args.deterministic or False)
    assert config.trainer_gpu_ids == (args.trainer_gpu_ids or [1])
    assert (config.orchestrator.advantage.type == "none") == (args.advantage is not None)


def test_functions_go_by_their_import_paths(functions: ModuleType, tmp_path: Path) -> None:
    args = RLArguments(
        loss=functools.partial(functions.my_loss, scale=2.0),
        advantage=functions.my_advantage,
        output_dir=str(tmp_path / "outputs"),
        eval_strategy="steps",
    )
    env = functools.partial(functions.load_environment, n=3)
    config = plan_run("models/x", env, args, env_args={"m": 4}).config
    loss, folder = config.trainer.loss, tmp_path / "outputs" / ".functions"
    assert isinstance(loss, CustomLossConfig)
    assert loss.import_path.rpartition(":")[2] == "my_loss"
    assert config.orchestrator.advantage.import_path.startswith(f"{folder}/my_advantage_")
    [trained] = config.orchestrator.env
    assert (trained.label, trained.args) == ("users_functions", {"m": 4})
    assert config.orchestrator.eval is not None
    assert config.orchestrator.eval.env[0].program == trained.program
    written = file_of(trained.id)
    assert written is not None
    assert written.parent == folder


def test_problems_are_said_in_the_names_of_the_arguments() -> None:
    with pytest.raises(ConfigError, match=r"batch_size \(10\) must be divisible by micro_batch_size"):
        plan_run("models/x", "reverse-text", RLArguments(batch_size=10), env_args={})
    args = RLArguments(batch_size=10, micro_batch_size=1, trainer_gpu_ids=[1, 2, 3, 4])
    with pytest.raises(ConfigError, match=r"^batch_size .* \* trainer_gpu_ids \(1 \* 4 = 4\)"):
        plan_run("models/x", "reverse-text", args, env_args={})
    with pytest.raises(ConfigError, match=r"inference.model.dtype must be one of .*, got .x. \(RLConfig\)"):
        plan_run("models/x", "reverse-text", RLArguments(inference={"model": {"dtype": "x"}}), env_args={})
    with pytest.raises(EnvironmentLoadError, match="not-there"):
        plan_run("models/x", "not-there", RLArguments(), env_args={})


def test_a_value_of_the_dialect_that_the_run_refuses_has_its_python_name(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_run("models/x", "reverse-text", RLArguments(rollouts_per_example=1, max_prompt_len=9), env_args={})
    assert "rollouts_per_example must be >= 2" in str(caught.value)
    assert "trainer.args" not in str(caught.value)
    with caplog.at_level(logging.WARNING):
        plan_run("models/x", "reverse-text", RLArguments(max_prompt_len=9), env_args={})
    assert "notice: max_prompt_len: prompts are not cut" in caplog.text


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("trainer.args.wandb.project", "wandb.project"),
        ("orchestrator.batch_size", "batch_size"),
        ("trainer_gpu_ids", "trainer_gpu_ids"),
        ("inference.parallel.tp", "inference.parallel.tp"),
        ("inference.vllm_args.swap_space", "inference.vllm_args.swap_space"),
        ("ckpt.resume_step = -1", "resume_from_checkpoint=True"),
        ("ckpt.allow_changes", "ckpt.allow_changes"),
    ],
)
def test_a_key_is_named_as_rlconfig_takes_it(key: str, name: str) -> None:
    with use_names(PYTHON_NAMES):
        assert key_name(key) == name


def test_an_environment_is_named_after_its_function_or_its_file(functions: ModuleType) -> None:
    assert name_of_environment(functions.load_my_env) == "my-env"
    functions.__dict__["__file__"] = "/some/word_games.py"
    assert name_of_environment(functions.load_environment) == "word_games"
    del functions.__dict__["__file__"]
    assert name_of_environment(functions.load_environment) == "notebook"


def test_model_and_data_of_fine_tuning_are_keys_of_sft() -> None:
    config = plan_sft("models/x", "chats.jsonl", SFTArguments(max_steps=3, model={"seq_len": 128}))
    assert (config.model.name, config.model.seq_len, config.data.name, config.max_steps) == ("models/x", 128, "chats.jsonl", 3)
    assert plan_sft(None, None, SFTArguments(data={"type": "fake"}, max_steps=1)).data.type == "fake"


def test_objects_that_no_other_process_has_are_refused(functions: ModuleType) -> None:
    with pytest.raises(ConfigError, match="model must be a Hugging Face name or a directory, got an object of type module"):
        plan_run(functions, "reverse-text", RLArguments(), env_args={})
    with pytest.raises(ConfigError, match="env must be the id of an environment or a function"):
        plan_run("models/x", object(), RLArguments(), env_args={})
    with pytest.raises(
        ConfigError, match="'load_environment' cannot be called with them: got an unexpected keyword argument 'k'"
    ):
        plan_run("models/x", functions.load_environment, RLArguments(), env_args={"k": 1})


def test_a_model_directory_that_is_not_there_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model \(models/not-there\) is not a directory"):
        RLTrainer("models/not-there", "reverse-text", RLArguments(use_lora=False))
