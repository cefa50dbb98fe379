import tomllib
from pathlib import Path

import pytest

from trivet.config.dump import literal, to_toml
from trivet.config.load import load_config
from trivet.config.schema.base import Section
from trivet.config.schema.environment import EnvConfig, EvalEnvConfig, SamplingConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import FakeDataConfig, SftConfig, SftValConfig
from trivet.config.schema.shared import WandbConfig
from trivet.config.schema.trainer import AdamWConfig, CosineSchedule, TrainerConfig

AWKWARD = {
    "text": 'a "quote"\nand \\ \t é \x7f',
    "deep": {"list": [1, [2.5, {"x": True}]], "a.b c": {}},
    "null": None,
    "big": 1e300,
}

CONFIGS: list[Section] = [
    TrainerConfig(),
    TrainerConfig(
        optim=AdamWConfig(max_norm=None, lr=3e-7), scheduler=CosineSchedule(min_lr=1e-9), max_steps=3, wandb=WandbConfig()
    ),
    OrchestratorConfig(rollouts_per_example=2, sampling=SamplingConfig(extra_body=AWKWARD)),
    OrchestratorConfig(
        rollouts_per_example=2, env=[EnvConfig(id="a", args=AWKWARD), EnvConfig(id="b"), EnvConfig(id="c", args={"x": 1})]
    ),
    InferenceConfig(vllm_args={"hf_overrides": {"rope": {"factor": 2.0}}}),
    SftConfig(val=SftValConfig(interval=3)),
    SftConfig(data=FakeDataConfig(length="variable"), max_steps=2),
    EvalConfig(steps=[1, 2], weights_dir=Path("somewhere") / "weights"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_a_configuration_survives_its_dump(config: Section, tmp_path: Path) -> None:
    file = tmp_path / "dumped.toml"
    file.write_text(to_toml(config))
    assert load_config(type(config), ["@", str(file)], environ={}).config == config


def test_the_roles_of_a_resolved_run_start_again_as_they_were(tmp_path: Path) -> None:
    argv = ["--orchestrator.rollouts-per-example", "2", "--max-steps", "5", "--trainer.optim.lr", "1e-5", "--wandb.name", "n"]
    run = load_config(RLConfig, argv, environ={}).config
    assert run.inference is not None
    for role in (run.trainer, run.orchestrator, run.inference):
        file = tmp_path / "role.toml"
        file.write_text(to_toml(role))
        assert load_config(type(role), ["@", str(file)], environ={}).config == role


def test_a_null_is_left_out_unless_the_default_is_something_else() -> None:
    values = tomllib.loads(to_toml(TrainerConfig(optim=AdamWConfig(max_norm=None))))
    assert "max_steps" not in values
    assert values["optim"]["max_norm"] == "None"
    run = RLConfig(inference=None)
    assert tomllib.loads(to_toml(run))["inference"] == "None"


def test_every_line_of_a_dump_with_origins_says_one() -> None:
    config = EvalConfig(env=[EvalEnvConfig(id="a"), EvalEnvConfig(id="b", args={"x": 1})])
    lines = to_toml(config, origins={"env.1.args.x": "flag --env.1.args.x"}).splitlines()
    assert "x = 1  # flag --env.1.args.x" in lines
    assert "eval_base = true  # default" in lines
    assert all("  # " in line for line in lines if line and not line.startswith("["))


@pytest.mark.parametrize("value", [True, 3, 1e-06, "a\nb", [1, "x"], {"a": {"b c": [None]}}, Path("x/y")])
def test_a_literal_is_one_line_of_toml(value: object) -> None:
    text = literal(value)
    assert "\n" not in text
    tomllib.loads(f"value = {text}")
