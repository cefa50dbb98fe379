"""Groups of an agent that is a program: what it is given, what is trained on, and what becomes of one without a reward."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.http_fake import serve
from trivet.environments.apis.groups import StageBoard
from trivet.environments.apis.load import load_host
from trivet.errors import EnvironmentLoadError, RolloutFailed
from trivet.wire.groups import GroupRequest, SamplingArguments, ServerAccess, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import GroupId
from trivet.wire.workers import HostSettings

TASKS = [{"prompt": "What is 6 times 7?", "answer": "42"}, {"prompt": "And 2?", "answer": "14"}]
ASK = """
import json, os, urllib.request

def ask(messages):
    body = json.dumps({"model": os.environ["TRIVET_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def report(reward):
    with open(os.environ["TRIVET_REWARD_FILE"], "w") as file:
        json.dump({"reward": reward, "scores": {"length": 2}}, file)

task = json.load(open(os.environ["TRIVET_TASK_FILE"]))
"""
TWO_TURNS = """
first = [{"role": "user", "content": task["prompt"]}]
said = ask(first)
said = ask([*first, said, {"role": "user", "content": "Are you sure?"}])
ask([{"role": "user", "content": "Another agent judges: " + said["content"]}])
report(float(task["answer"] in said["content"]))
"""


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers 42, with a token for each character; a prompt's tokens continue those that it is told."""
    bodies: list[dict[str, Any]] = []

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked = json.loads(body)
        bodies.append(asked)
        prompt = [*asked.get("known_token_ids", [1]), 7]
        choice = {
            "message": {"role": "assistant", "content": "42"},
            "finish_reason": "stop",
            "token_ids": [52, 50],
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
            "policy_versions": [[3, 2]],
        }
        return 200, json.dumps({"model": "m", "prompt_token_ids": prompt, "choices": [choice]}).encode()

    with serve(answer) as url:
        yield url, bodies


def play(tmp_path: Path, url: str, program: str, *, num_rollouts: int = 2, **args: Any) -> list[Rollout]:
    (tmp_path / "agent.py").write_text(ASK + program)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    command = [sys.executable, str(tmp_path / "agent.py")]
    settings = HostSettings(
        env_id="agent",
        name="toy",
        args={"command": command, "tasks": str(tmp_path / "tasks.jsonl"), **args},
        model_name="m",
        servers=ServerAccess(base_urls=[url], key_variables=["NO_KEY"]),
    )
    host = load_host(settings, environ={}, stages=StageBoard())
    request = GroupRequest(
        group_id=GroupId(0),
        env="toy",
        example_id=0,
        num_rollouts=num_rollouts,
        base_url=url,
        sampling=SamplingArguments(temperature=0.7, seed=1, fields={"max_tokens": 5}),
    )

    async def run() -> list[Rollout]:
        async with host.serving():
            assert host.example(split=Split.TRAIN, example_id=1).answer == "14"
            return await host.run_group(request)

    return asyncio.run(run())


def test_each_rollout_trains_on_its_own_conversations_with_the_run_s_sampling(
    tmp_path: Path, server: tuple[str, list[dict[str, Any]]]
) -> None:
    url, bodies = server
    rollouts = play(tmp_path, url, TWO_TURNS)
    assert [(rollout.reward, rollout.scores["length"], rollout.num_turns) for rollout in rollouts] == [(1.0, 2.0, 3)] * 2
    for rollout in rollouts:
        whole, judged = rollout.samples  # the second agent's conversation is a sample of its own
        assert whole.token_ids_T.tolist() == [1, 7, 52, 50, 7, 52, 50]
        assert whole.loss_mask_T.tolist() == [False, False, True, True, False, True, True]
        assert judged.token_ids_T.tolist() == [1, 7, 52, 50]
        assert [message["content"] for message in rollout.completion][:3] == ["42", "Are you sure?", "42"]
    assert len({body["seed"] for body in bodies}) == len(bodies) == 6
    assert all((body["temperature"], body["max_tokens"], body["logprobs"]) == (0.7, 5, True) for body in bodies)


def test_a_function_of_the_user_scores_what_the_agent_did(tmp_path: Path, server: tuple[str, list[Any]]) -> None:
    rewards = "async def score(task, completion, directory):\n    return len(completion) + float(task['answer'])\n"
    (tmp_path / "rewards.py").write_text(rewards)
    program = 'ask([{"role": "user", "content": "hi"}])\n'
    (rollout,) = play(tmp_path, server[0], program, num_rollouts=1, reward=f"{tmp_path / 'rewards.py'}:score")
    assert rollout.reward == 43.0


def test_an_agent_without_a_reward_is_a_failure_with_its_reason(tmp_path: Path, server: tuple[str, list[Any]]) -> None:
    with pytest.raises(RolloutFailed, match=r"reported no reward: it ended with exit code 5;(.|\n)*the disk is full") as failed:
        play(tmp_path, server[0], 'import sys\nprint("the disk is full")\nsys.exit(5)\n', num_rollouts=1)
    assert not failed.value.is_infrastructure


def test_an_agent_is_ended_when_its_time_is_over_and_what_it_reported_counts(
    tmp_path: Path, server: tuple[str, list[Any]]
) -> None:
    program = 'import subprocess\nask([{"role": "user", "content": "hi"}])\nreport(0.5)\nsubprocess.run(["sleep", "1000"])\n'
    (rollout,) = play(tmp_path, server[0], program, num_rollouts=1, timeout_s=3.0)
    assert (rollout.reward, rollout.is_truncated, rollout.num_turns) == (0.5, True, 1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"command": []}, "args: Expected `array` of length >= 1"),
        ({"tasks": "/nowhere.jsonl"}, "'/nowhere.jsonl' cannot be read"),
        ({"max_turn": 3}, "max_turn"),
        ({"reward": "/nowhere.py:score"}, "cannot be imported"),
    ],
)
def test_wrong_arguments_are_named_when_the_environment_is_loaded(tmp_path: Path, args: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentLoadError, match=message):
        play(tmp_path, "http://127.0.0.1:9/v1", "", **args)
