"""Test the checks and derived keys of a server that sleeps while its GPU's trainer learns."""

import re

import pytest

from trivet.config.load import load_config
from trivet.config.schema.rl import RLConfig
from trivet.errors import ConfigError

GROUPED = ("--orchestrator.rollouts-per-example", "2", "--max-steps", "10", "--max-model-len", "2048")
SLEEPING = (*GROUPED, "--inference.sleep-while-training", "--max-async-level", "0")


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(RLConfig, argv, environ={})
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-async-level", "1"], "needs max_async_level = 0, got 1: at a higher level the server generates while"),
        (["--max-async-level", "0", "--orchestrator.eval.env.id", "a"], r"\[orchestrator.eval\] generates while the trainer"),
        (["--max-async-level", "0", "--orchestrator.val"], r"\[orchestrator.val\] generates while the trainer"),
        (
            ["--max-async-level", "0", "--deployment.type", "multi_node"],
            "gives each role its own: remove inference.sleep_while",
        ),
    ],
)
def test_a_server_that_sleeps_while_the_trainer_learns_generates_nothing_then(words: list[str], said: str) -> None:
    assert re.search(said, refusal(*GROUPED, "--inference.sleep-while-training", *words))


def test_servers_that_the_run_does_not_start_take_turns_with_the_trainer_too() -> None:
    words = (*GROUPED, "--inference", "None", "--orchestrator.sleep-servers", "true")
    said = refusal(*words)
    assert "trainer.release_gpu_memory (false) must be orchestrator.sleep_servers (true); set it to true" in said
    assert "orchestrator.sleep_servers = true needs max_async_level = 0" in said


def test_a_teachers_server_does_not_sleep() -> None:
    words = ["--orchestrator.teacher-model.model.name", "big", "--teacher-inference.sleep-while-training"]
    assert "only the policy's server can sleep; remove it" in refusal(*GROUPED, *words)


def test_a_run_whose_server_sleeps_tells_orchestrator_and_trainer() -> None:
    config = load_config(RLConfig, SLEEPING, environ={}).config
    assert config.orchestrator.sleep_servers
    assert config.trainer.release_gpu_memory


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            (*SLEEPING, "--orchestrator.sleep-servers", "false"),
            r"orchestrator.sleep_servers \(false\) must be inference.sleep_while_training \(true\)",
        ),
        (
            (*SLEEPING, "--trainer.release-gpu-memory", "false"),
            r"trainer.release_gpu_memory \(false\) must be inference.sleep_while_training \(true\)",
        ),
        (
            (*GROUPED, "--orchestrator.sleep-servers"),
            r"orchestrator.sleep_servers \(true\) must be inference.sleep_while_training \(false\); remove",
        ),
    ],
)
def test_roles_that_do_not_take_turns_with_the_server_are_refused(words: tuple[str, ...], said: str) -> None:
    assert re.search(said, refusal(*words))
