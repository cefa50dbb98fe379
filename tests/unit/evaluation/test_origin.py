import fcntl

import pytest

from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EnvConfig, EvalEnvConfig, OnlineEvalConfig
from trivet.config.schema.inference import ClientConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import ConfigError
from trivet.evaluation.servers import require_free_servers
from trivet.evaluation.targets import PolicyOrigin, read_origin


@pytest.fixture
def layout(tmp_path):
    layout = RunLayout(tmp_path)
    layout.weights.mkdir()
    layout.configs.mkdir()
    return layout


def run_of(layout, **changes):
    config = OrchestratorConfig(
        rollouts_per_example=2,
        max_steps=40,
        model={"name": "some/model"},
        trajectory_strategy="branching",
        env=[EnvConfig(id="trained", args={"x": 1})],
        client=ClientConfig(base_url=["http://127.0.0.1:8001/v1"]),
        **changes,
    )
    (layout.configs / "orchestrator.toml").write_text(to_toml(config))


def test_a_run_tells_its_model_its_last_step_and_what_it_trains_on(layout):
    run_of(layout)
    origin = read_origin(layout.weights)
    assert (origin.model_name, origin.max_steps, origin.trajectory_strategy) == ("some/model", 40, "branching")
    assert list(origin.envs) == [EvalEnvConfig(id="trained", args={"x": 1})]


def test_what_a_run_evaluates_itself_on_comes_before_what_it_trains_on(layout):
    run_of(layout, eval=OnlineEvalConfig(env=[EvalEnvConfig(id="held-out", skip_first=3)]))
    assert list(read_origin(layout.weights).envs) == [EvalEnvConfig(id="held-out", skip_first=3)]


def test_fine_tuning_tells_its_model(layout):
    (layout.configs / "trainer.toml").write_text('max_steps = 7\n[model]\nname = "some/model"\n')
    assert read_origin(layout.weights) == PolicyOrigin(model_name="some/model", max_steps=7)


def test_nothing_is_known_of_weights_without_a_run_or_of_a_configuration_of_another_version(layout, caplog):
    assert read_origin(layout.weights) == read_origin(None) == PolicyOrigin()
    (layout.configs / "orchestrator.toml").write_text("a_key_of_tomorrow = 1\n")
    assert read_origin(layout.weights) == PolicyOrigin()
    assert "is of another version and is not used" in caplog.text


def test_servers_that_a_live_run_generates_with_are_left_alone(layout):
    run_of(layout)
    origin = read_origin(layout.weights)
    theirs, others = ClientConfig(base_url=["http://127.0.0.1:8001"]), ClientConfig(base_url=["http://127.0.0.1:8002/v1"])
    require_free_servers(theirs, origin, layout.weights)
    with layout.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"is going on and generates with http://127\.0\.0\.1:8001"):
            require_free_servers(theirs, origin, layout.weights)
        with pytest.raises(ConfigError, match="generates with http://localhost:8001/v1"):
            require_free_servers(ClientConfig(base_url=["http://localhost:8001/v1"]), origin, layout.weights)
        require_free_servers(others, origin, layout.weights)
    require_free_servers(theirs, origin, layout.weights)
