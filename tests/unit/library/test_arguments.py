"""Names and values of arguments are checked where they are written."""

import logging

import pytest

from trivet.config.schema.rl import RLConfig
from trivet.config.schema.trainer import GrpoLossConfig, TrainerConfig
from trivet.config.schema.vf_rl import VfTrainerArgs
from trivet.errors import ConfigError
from trivet.library.arguments import RUN_KEYS, EvalArguments, RLArguments, SFTArguments, entries_of, written_values

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
