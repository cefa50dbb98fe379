"""A teacher is named once. Its server, its address and the loss follow from that, or loading reports the contradiction."""

import pytest

from trivet.config.load import load_config
from trivet.config.schema.rl import RLConfig
from trivet.errors import ConfigError

RUN = ("--orchestrator.rollouts-per-example", "2", "--max-steps", "10", "--trainer.loss.teacher-tau", "0.5")
NAMED = (*RUN, "--orchestrator.teacher-model.model.name", "Qwen/Qwen3-4B")


def load(*argv: str):
    return load_config(RLConfig, argv, environ={})


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    return str(caught.value)


def test_gpus_for_a_teacher_have_its_server_started_and_asked():
    config = load(*NAMED, "--teacher-gpu-ids", "2,3", "--seq-len", "512", "--seed", "7", "--output-dir", "o").config
    teacher = config.teacher_inference
    assert teacher is not None
    assert config.orchestrator.teacher_model is not None
    assert (teacher.model.name, teacher.is_teacher, teacher.seed, str(teacher.output_dir)) == ("Qwen/Qwen3-4B", True, 7, "o")
    assert teacher.model.max_model_len == 513
    assert teacher.server.port == 8001
    assert config.orchestrator.teacher_model.client.base_url == ["http://127.0.0.1:8001/v1"]


def test_the_section_of_the_server_may_name_the_teacher():
    argv = (
        "--teacher-inference.model.name",
        "big",
        "--teacher-inference.server.port",
        "9000",
        "--inference.server.port",
        "8100",
    )
    config = load(*RUN, *argv).config
    assert config.orchestrator.teacher_model is not None
    assert config.orchestrator.teacher_model.model.name == "big"
    assert config.orchestrator.teacher_model.client.base_url == ["http://127.0.0.1:9000/v1"]


def test_a_teacher_that_runs_elsewhere_is_not_started():
    config = load(*NAMED, "--orchestrator.teacher-model.client.base-url", "http://big:8000/v1").config
    assert config.teacher_inference is None
    assert config.orchestrator.teacher_model is not None
    assert config.orchestrator.teacher_model.client.base_url == ["http://big:8000/v1"]


def test_a_loss_that_needs_a_teacher_is_refused_without_one():
    assert "set orchestrator.teacher_model.model.name" in refusal(*RUN)


def test_a_server_for_a_teacher_without_a_name_is_refused():
    assert "orchestrator.teacher_model.model.name is not set" in refusal(*RUN, "--teacher-gpu-ids", "1")


def test_an_address_that_is_not_the_started_server_is_refused():
    argv = ("--teacher-gpu-ids", "1", "--orchestrator.teacher-model.client.base-url", "http://big:8000/v1")
    assert "is not the server of this run, teacher_inference.server (127.0.0.1:8001)" in refusal(*NAMED, *argv)


def test_servers_found_by_name_are_for_the_policy():
    said = refusal(*NAMED, "--orchestrator.teacher-model.client.elastic.hostname", "big")
    assert "name the teacher's in client.base_url" in said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--trainer.loss.teacher-tau", "0"), "the loss does not use its log-probabilities"),
        (("--orchestrator.sampling.temperature", "0.7"), "log-probabilities are of temperature 1"),
        (
            ("--orchestrator.buffer.online-difficulty-filtering",),
            "although the teacher's log-probabilities give them a gradient",
        ),
        (("--teacher-inference.model.max-model-len", "2048"), "refuses samples of that length"),
    ],
)
def test_what_is_probably_not_meant_is_said(argv, said):
    assert any(said in notice for notice in load(*NAMED, *argv).notices)
    assert not any(said in notice for notice in load(*NAMED).notices)


def test_the_old_key_of_runs_without_rewards_says_what_to_set():
    assert "set trainer.loss.adv_tau = 0" in refusal(*NAMED, "--orchestrator.buffer.skip-verification")
