import pytest

from trivet.config.load import load_config
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import ConfigError

TWO_ENVS = ("--env", '[{"id": "a"}, {"id": "b"}]')


def load(*argv: str) -> OrchestratorConfig:
    return load_config(OrchestratorConfig, ["--rollouts-per-example", "2", *argv], environ={}).config


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    return str(caught.value)


def test_ratios_need_one_number_per_environment() -> None:
    said = refusal(*TWO_ENVS, "--buffer.env-ratios", "1,2,3")
    assert said.startswith("buffer.env_ratios has 3 numbers for 2 environments (a, b): 3 != 2")
    assert load(*TWO_ENVS, "--buffer.env-ratios", "3,1").buffer.env_ratios == [3.0, 1.0]


@pytest.mark.parametrize("ratio", ["0", "-1"])
def test_ratios_must_be_positive(ratio: str) -> None:
    assert f"must be positive numbers, got {float(ratio)} at place 1" in refusal(*TWO_ENVS, "--buffer.env-ratios", f"1,{ratio}")


def test_thresholds_must_leave_room_between_them() -> None:
    said = refusal("--buffer.easy-threshold", "0.5", "--buffer.hard-threshold", "0.5")
    assert "easy_threshold (0.5) must be > hard_threshold (0.5)" in said


def test_keys_of_another_advantage_are_refused() -> None:
    assert 'eps applies to type "std_norm", got type "rloo"' in refusal("--advantage.type", "rloo", "--advantage.eps", "0.1")
    argv = ("--advantage.type", "max_rl", "--advantage.length-weighted-mean")
    assert 'length_weighted_mean applies to type "default", got type "max_rl"' in refusal(*argv)
    assert "needs import_path" in refusal("--advantage.type", "custom")
    assert load("--advantage.length-weighted-mean").advantage.type == "default"


@pytest.mark.parametrize("kind", ["default", "rloo", "std_norm", "length_weighted_mean", "max_rl"])
def test_a_group_of_one_has_nothing_to_be_compared_with(kind: str) -> None:
    said = refusal("--rollouts-per-example", "1", "--advantage.type", kind)
    assert said.startswith(f'rollouts_per_example must be >= 2 for advantage "{kind}", got 1')
    assert 'set advantage = "None"' in said


def test_a_filter_can_be_taken_away() -> None:
    filters = load("--filters.gibberish", "None", "--filters.repetition.enforce").filters
    assert filters.gibberish is None
    assert filters.repetition is not None
    assert filters.repetition.enforce


def test_rollouts_without_scores_are_refused_with_the_reason() -> None:
    assert "set trainer.loss.adv_tau = 0 to learn from a teacher alone" in refusal("--buffer.skip-verification", "true")
    assert load("--buffer.skip-verification", "false").buffer.hash_keys == ["task", "prompt"]
