from pathlib import Path

import pytest

from trivet.config.load import load_config
from trivet.config.schema.environment import EnvSamplingConfig, SamplingConfig, TempSchedulerConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.errors import ConfigError

GROUPED = ("--rollouts-per-example", "2")


def load(*argv: str) -> OrchestratorConfig:
    return load_config(OrchestratorConfig, [*GROUPED, *argv], environ={}).config


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    return str(caught.value)


def test_without_a_schedule_the_temperature_is_one_or_what_was_set() -> None:
    assert SamplingConfig().temperature_at(5, max_steps=None) == 1.0
    assert SamplingConfig(temperature=0.7).temperature_at(5, max_steps=10) == 0.7


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.75), ("cosine", 0.75)])
def test_a_schedule_goes_from_start_to_end_and_stays(kind: str, middle: float) -> None:
    argv = (f"--sampling.temp-scheduler.type={kind}", "--sampling.temp-scheduler.start-temperature=1.0")
    sampling = load(*argv, "--sampling.temp-scheduler.end-temperature=0.5", "--sampling.temp-scheduler.total-steps=11").sampling
    temperatures = [sampling.temperature_at(step, max_steps=500) for step in (1, 6, 11, 40)]
    assert temperatures == pytest.approx([1.0, middle, 0.5, 0.5])


def test_a_schedule_without_its_own_length_ends_with_the_run() -> None:
    config = load("--sampling.temp-scheduler.end-temperature", "0.5", "--max-steps", "3")
    assert config.sampling.temperature_at(2, max_steps=config.max_steps) == 0.75
    said = refusal("--sampling.temp-scheduler.end-temperature", "0.5")
    assert said == "sampling.temp_scheduler ends after max_steps, which is not set: set total_steps in it, or max_steps"


def test_a_temperature_and_a_schedule_exclude_each_other() -> None:
    said = refusal("--sampling.temperature", "0.7", "--sampling.temp-scheduler.start-temperature", "1.2")
    assert "temperature (0.7) and temp_scheduler (start_temperature 1.2) exclude each other" in said


def test_an_environment_changes_what_it_names_and_keeps_the_rest() -> None:
    run = SamplingConfig(temperature=0.7, max_tokens=64, extra_body={"stop": ["x"], "logit_bias": {}})
    merged = EnvSamplingConfig(max_tokens=128, top_p=0.9, extra_body={"stop": ["y"]}).over(run)
    assert (merged.temperature, merged.max_tokens, merged.top_p, merged.min_tokens) == (0.7, 128, 0.9, 0)
    assert merged.extra_body == {"stop": ["y"], "logit_bias": {}}
    assert EnvSamplingConfig().over(run) == run


def test_an_environments_temperature_replaces_the_runs_schedule_and_the_other_way_round() -> None:
    schedule = TempSchedulerConfig(start_temperature=2.0, end_temperature=1.0, total_steps=2)
    fixed = EnvSamplingConfig(temperature=0.3).over(SamplingConfig(temp_scheduler=schedule))
    assert [fixed.temperature_at(step, max_steps=None) for step in (1, 2)] == [0.3, 0.3]
    moving = EnvSamplingConfig(temp_scheduler=schedule).over(SamplingConfig(temperature=0.3))
    assert [moving.temperature_at(step, max_steps=None) for step in (1, 2)] == [2.0, 1.0]


def test_sampling_of_an_environment_is_read_from_its_table(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[[orchestrator.env]]\nid = "a"\nsampling = { max_tokens = 9 }\n[[orchestrator.env]]\nid = "b"\n')
    argv = ["@", str(file), "--orchestrator.rollouts-per-example", "2", "--max-steps", "1"]
    config = load_config(RLConfig, argv, environ={}).config.orchestrator
    assert [env.sampling.over(config.sampling).max_tokens for env in config.env] == [9, None]


def test_a_knob_in_an_environments_extra_body_is_refused_with_both_places() -> None:
    said = refusal("--env.0.sampling.extra-body.top-k", "5")
    assert said.startswith("env.0.sampling.extra_body.top_k (5) and env.0.sampling.top_k (-1) are the same knob")
    both = refusal("--sampling.extra-body.min-p", "0.5", "--env.0.sampling.max-tokens", "3")
    assert both.startswith("sampling.extra_body.min_p")
    assert "env.0" not in both


def test_an_environments_tokens_are_checked_together_with_the_runs() -> None:
    said = refusal("--sampling.min-tokens", "9", "--env.0.sampling.max-tokens", "8")
    assert said == "env.0.sampling.min_tokens (9) must be <= env.0.sampling.max_tokens (8)"


def test_a_bias_of_one_environment_is_said_with_its_place() -> None:
    argv = [*GROUPED, "--max-steps", "1", "--env.0.sampling.top-p", "0.5"]
    notices = load_config(OrchestratorConfig, argv, environ={}).notices
    assert notices == ("the trainer cannot reproduce env.0.sampling.top_p (0.5): the importance ratio is biased",)
