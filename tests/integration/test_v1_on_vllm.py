"""The v1 API on the real vLLM: samples have the bytes that the server answered with, over several turns and with tools.

The environments run with verifiers 0.4 in a process of its own, and reach the server through a recorder, so that nothing of the
adapter has a say in what its samples are compared with.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from support.http_fake import serve
from support.served_turns import ServedTurn, assert_trains_on_what_was_sampled
from support.servers import ServerProcess
from support.template_server import write_conversation
from support.tiny_chats import CALL, TEMPLATES, THOUGHT, WORDS, make_model_tokenizer, model_name, run_templates_server
from support.v1_program import Order
from support.venvs import interpreter_with
from trivet.wire.codec import decode
from trivet.wire.groups import GroupRequest, SamplingArguments
from trivet.wire.rollouts import Group, GroupId, Rollout
from trivet.wire.servers import ServerAccess
from trivet.wire.versions import PolicyVersion, VersionRun
from trivet.wire.workers import HostSettings

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ROOT = Path(__file__).parents[2]
SHOP_CALL = r'<tool_call>\n?\{"name": ?"shop_price", ?"arguments": ?\{"item": ?"(pen|map|lamp)"\}\}\n?</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with run_templates_server(tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interpreter_with("0.4.0", tmp_path_factory.mktemp("venvs"), "pytest")


@contextmanager
def recorded(base_url: str, template: str) -> Iterator[tuple[str, list[ServedTurn]]]:
    """The address of a recorder in front of the server, and the turns that passed it."""
    turns: list[ServedTurn] = []
    tokenizer = make_model_tokenizer(template)
    with httpx.Client(base_url=base_url, timeout=300) as client:

        def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
            response = client.request(method, path, content=body, headers={"content-type": "application/json"})
            asked, answered = json.loads(body), response.json()
            assert response.is_success, response.text
            choice = answered["choices"][0]
            turns.append(
                ServedTurn(
                    text=write_conversation(tokenizer, asked["messages"], tools=asked.get("tools")),
                    read=answered["prompt_token_ids"],
                    sampled=choice["token_ids"],
                    logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
                    versions=[VersionRun(PolicyVersion(version), length) for version, length in choice["policy_versions"]],
                )
            )
            return response.status_code, response.content

        with serve(answer) as url:
            yield url, turns


def play(python: Path, url: str, out: Path, *, env_id: str, args: dict[str, Any], model: str, **fields: Any) -> Rollout:
    """One rollout, played by another interpreter."""
    order = Order(
        settings=HostSettings(
            env_id=env_id,
            name="toy",
            args=args,
            model_name=model,
            servers=ServerAccess(base_urls=[url], key_variables=["OPENAI_API_KEY"]),
            rollout_timeout_s=240.0,
        ),
        request=GroupRequest(
            group_id=GroupId(1),
            env="toy",
            example_id=0,
            num_rollouts=1,
            base_url=url,
            sampling=SamplingArguments(temperature=1.0, seed=1, fields={"max_tokens": 120, **fields}),
        ),
    )
    path = [ROOT / "src", ROOT / "tests", ROOT / "tests/support/environments", ROOT / "environments/shop_clerk"]
    done = subprocess.run(
        [str(python), "tests/support/v1_program.py", str(out)],
        input=msgspec.json.encode(order),
        capture_output=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    [rollout] = decode(out.read_bytes(), Group).rollouts
    return rollout


@pytest.mark.parametrize("template", TEMPLATES)
def test_conversations_have_the_tokens_of_the_server(
    server: ServerProcess, python: Path, template: str, tmp_path: Path
) -> None:
    thought = {"qwen3": THOUGHT, "deepseek_r1": THOUGHT.removeprefix(r"<think>\n")}.get(template, "")
    fields = {
        "chat_template": make_model_tokenizer(template).chat_template,
        "structured_outputs": {"regex": thought + WORDS},
    }
    args = {"rows": [{"lines": ["Sure?", "Really?"]}]}
    with recorded(server.base_url, template) as (url, turns):
        rollout = play(python, url, tmp_path / "out", env_id="talks", args=args, model=model_name(server.base_url), **fields)
    assert len(turns) == 3
    assert_trains_on_what_was_sampled(rollout, turns, tokenizer=make_model_tokenizer(template))
    assert len(rollout.samples) == (3 if thought else 1)


def test_a_harness_program_with_tools_has_the_tokens_of_the_server(server: ServerProcess, python: Path, tmp_path: Path) -> None:
    """verifiers' own `null` harness, a process, and an MCP server with the tools: the example environment as it is."""
    fields = {
        "chat_template": make_model_tokenizer("hermes").chat_template,
        "structured_outputs": {"regex": SHOP_CALL},
    }
    args = {"num_tasks": 1, "agent": {"max_turns": 3}}
    with recorded(server.base_url, "hermes") as (url, turns):
        rollout = play(
            python, url, tmp_path / "out", env_id="shop-clerk", args=args, model=model_name(server.base_url), **fields
        )
    assert len(turns) == 3
    assert_trains_on_what_was_sampled(rollout, turns, tokenizer=make_model_tokenizer("hermes"))
    assert len(rollout.samples) == 1
    assert [message["role"] for message in rollout.completion] == ["assistant", "tool"] * 2 + ["assistant"]


def test_calls_of_a_harness_inside_the_worker_have_the_tokens_of_the_server(
    server: ServerProcess, python: Path, tmp_path: Path
) -> None:
    fields = {"chat_template": make_model_tokenizer("qwen3").chat_template, "structured_outputs": {"regex": THOUGHT + CALL}}
    args = {"rows": [{"way": "tools"}], "agent": {"max_turns": 4}}
    with recorded(server.base_url, "qwen3") as (url, turns):
        rollout = play(python, url, tmp_path / "out", env_id="talks", args=args, model=model_name(server.base_url), **fields)
    assert len(turns) == 4
    assert_trains_on_what_was_sampled(rollout, turns, tokenizer=make_model_tokenizer("qwen3"))
    assert len(rollout.samples) == 1
