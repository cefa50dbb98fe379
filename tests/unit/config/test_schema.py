"""Sections: what they derive for a run, and what a section alone refuses. Other refusals are in tests/unit/messages.txt."""

from pathlib import Path
from typing import Any

import pytest

from trivet.config.load import load_config
from trivet.config.schema.deployment import DeploymentConfig
from trivet.config.schema.environment import EnvSamplingConfig, SamplingConfig, TempSchedulerConfig
from trivet.config.schema.inference import ClientConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig

URLS = ["http://a:8000/v1", "http://b:8000/v1"]
ENVIRON = {"KEY_A": "a", "KEY_B": "b"}
RUN = ("--orchestrator.rollouts-per-example", "2", "--max-steps", "10")
TAUGHT = ("--trainer.loss.teacher-tau", "0.5")


def load(*argv: str) -> RLConfig:
    return load_config(RLConfig, [*RUN, *argv], environ={}).config


def load_orchestrator(*argv: str) -> OrchestratorConfig:
    return load_config(OrchestratorConfig, ["--rollouts-per-example", "2", *argv], environ={}).config


def test_one_variable_holds_the_key_of_all_servers_or_each_has_its_own() -> None:
    config = ClientConfig(base_url=URLS, api_key_var=["KEY_A"])
    assert [config.access.api_key(url, ENVIRON) for url in URLS] == ["a", "a"]
    config = ClientConfig(base_url=URLS, api_key_var=["KEY_A", "KEY_B"])
    assert [config.access.api_key(url, ENVIRON) for url in ("http://b:8000", "http://b:8000/v1/", URLS[0])] == ["b", "b", "a"]
    assert config.access.api_key(URLS[0], {}) is None


def test_a_filter_can_be_taken_away() -> None:
    filters = load_orchestrator("--filters.gibberish", "None", "--filters.repetition.enforce").filters
    assert filters.gibberish is None
    assert filters.repetition is not None
    assert filters.repetition.enforce


@pytest.mark.parametrize(
    ("changes", "num_nodes"),
    [
        ({}, 2),
        ({"num_train_nodes": 4}, 5),
        ({"num_infer_replicas": 3}, 4),
        ({"num_infer_nodes": 2, "num_infer_replicas": 3, "max_infer_replicas": 4}, 9),
        ({"num_infer_nodes": 0, "num_train_nodes": 2}, 2),
        ({"num_env_nodes": 1, "max_env_nodes": 3}, 5),
    ],
)
def test_nodes_are_counted(changes: dict[str, Any], num_nodes: int) -> None:
    assert DeploymentConfig.model_validate({"type": "multi_node", **changes}).num_nodes == num_nodes
    assert (DeploymentConfig().is_multi_node, DeploymentConfig().num_nodes) == (False, 1)


def test_a_resolved_configuration_of_one_node_names_every_key_and_is_read_again() -> None:
    assert DeploymentConfig.model_validate(DeploymentConfig(gpus_per_node=4).model_dump()) == DeploymentConfig(gpus_per_node=4)


def test_a_run_without_servers_of_its_own_needs_no_nodes_that_serve() -> None:
    apart = ("--inference", "None", "--orchestrator.client.base-url", "http://far:8000/v1")
    config = load("--deployment.type", "multi_node", *apart, "--deployment.num-infer-nodes", "0")
    assert (config.inference, config.deployment.num_nodes) == (None, 1)


@pytest.mark.parametrize(
    ("words", "is_enabled", "rank"),
    [((), False, 16), (("--trainer.model.lora",), True, 16), (("--trainer.model.lora.rank", "40"), True, 40)],
)
def test_the_server_serves_adapters_of_the_trainers_rank(words: tuple[str, ...], is_enabled: bool, rank: int) -> None:
    inference = load(*words).inference
    assert inference is not None
    assert (inference.enable_lora, inference.max_lora_rank) == (is_enabled, rank)
    assert load("--inference", "None", *words).inference is None


def test_without_a_schedule_the_temperature_is_one_or_what_was_set() -> None:
    assert SamplingConfig().temperature_at(5, max_steps=None) == 1.0
    assert SamplingConfig(temperature=0.7).temperature_at(5, max_steps=10) == 0.7


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_goes_from_start_to_end_and_stays(kind: str) -> None:
    argv = (f"--sampling.temp-scheduler.type={kind}", "--sampling.temp-scheduler.start-temperature=1.0")
    end = ("--sampling.temp-scheduler.end-temperature=0.5", "--sampling.temp-scheduler.total-steps=11")
    sampling = load_orchestrator(*argv, *end).sampling
    temperatures = [sampling.temperature_at(step, max_steps=500) for step in (1, 6, 11, 40)]
    assert temperatures == pytest.approx([1.0, 0.75, 0.5, 0.5])
    config = load_orchestrator("--sampling.temp-scheduler.end-temperature", "0.5", "--max-steps", "3")
    assert config.sampling.temperature_at(2, max_steps=config.max_steps) == 0.75


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
    orchestrator = load("@", str(file)).orchestrator
    assert [env.sampling.over(orchestrator.sampling).max_tokens for env in orchestrator.env] == [9, None]


def test_gpus_for_a_teacher_have_its_server_started_and_asked() -> None:
    named = (*TAUGHT, "--orchestrator.teacher-model.model.name", "Qwen/Qwen3-4B", "--teacher-gpu-ids", "2,3")
    config = load(*named, "--seq-len", "512", "--seed", "7", "--output-dir", "o")
    teacher = config.teacher_inference
    assert teacher is not None
    assert config.orchestrator.teacher_model is not None
    assert (teacher.model.name, teacher.is_teacher, teacher.seed, str(teacher.output_dir)) == ("Qwen/Qwen3-4B", True, 7, "o")
    assert (teacher.model.max_model_len, teacher.server.port) == (513, 8001)
    assert config.orchestrator.teacher_model.client.base_url == ["http://127.0.0.1:8001/v1"]


def test_the_section_of_the_server_may_name_the_teacher() -> None:
    ports = ("--teacher-inference.server.port", "9000", "--inference.server.port", "8100")
    teacher = load(*TAUGHT, "--teacher-inference.model.name", "big", *ports).orchestrator.teacher_model
    assert teacher is not None
    assert (teacher.model.name, teacher.client.base_url) == ("big", ["http://127.0.0.1:9000/v1"])


def test_a_teacher_that_runs_elsewhere_is_not_started() -> None:
    named = ("--orchestrator.teacher-model.model.name", "big", "--orchestrator.teacher-model.client.base-url", URLS[0])
    config = load(*TAUGHT, *named)
    assert config.teacher_inference is None
    assert config.orchestrator.teacher_model is not None
    assert config.orchestrator.teacher_model.client.base_url == [URLS[0]]
