"""The v1 API on the real vLLM: samples have the bytes that the server answered with, over several turns and with tools.

The environments run with verifiers 0.4 in a process of its own, and reach the server through a recorder, so that nothing of the
adapter has a say in what its samples are compared with.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from trivet.wire.groups import GroupRequest, SamplingArguments, ServerAccess
from trivet.wire.rollouts import Group, Rollout
from trivet.wire.versions import GroupId, PolicyVersion, VersionRun
from trivet.wire.workers import HostSettings

pytestmark = pytest.mark.vllm

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


def order_of(url: str, *, env_id: str, args: dict[str, Any], model: str, template: str, grammar: str) -> Order:
    """One rollout with a chat template, of a model that can only say what the grammar allows."""
    fields = {
        "max_tokens": 120,
        "chat_template": make_model_tokenizer(template).chat_template,
        "structured_outputs": {"regex": grammar},
    }
    return Order(
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
            sampling=SamplingArguments(temperature=1.0, seed=1, fields=fields),
        ),
    )


def play(python: Path, orders: list[Order], directory: Path) -> list[Rollout]:
    """The rollout of each order, played by another interpreter."""
    path = [ROOT / "src", ROOT / "tests", ROOT / "tests/support/environments", ROOT / "environments/shop_clerk"]
    done = subprocess.run(
        [str(python), "tests/support/v1_program.py", str(directory)],
        input=msgspec.json.encode(orders),
        capture_output=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    groups = [decode((directory / str(number)).read_bytes(), Group) for number in range(len(orders))]
    return [rollout for group in groups for rollout in group.rollouts]


def test_samples_have_the_tokens_that_the_server_answered_with(server: ServerProcess, python: Path, tmp_path: Path) -> None:
    """Conversations with every template; calls of a harness inside the worker; and the example with tools as it is: verifiers' own
    `null` harness, a process, and an MCP server.
    """
    thoughts = {"qwen3": THOUGHT, "deepseek_r1": THOUGHT.removeprefix(r"<think>\n")}
    talk = {"rows": [{"lines": ["Sure?", "Really?"]}]}
    cases: list[tuple[str, str, dict[str, Any], str, int, int]] = [
        (template, "talks", talk, thoughts.get(template, "") + WORDS, 3, 3 if template in thoughts else 1)
        for template in TEMPLATES
    ]
    calls = {"rows": [{"way": "tools"}], "agent": {"max_turns": 4}}
    cases.append(("qwen3", "talks", calls, THOUGHT + CALL, 4, 1))
    cases.append(("hermes", "shop-clerk", {"num_tasks": 1, "agent": {"max_turns": 3}}, SHOP_CALL, 3, 1))
    model = model_name(server.base_url)
    with ExitStack() as recorders:
        recordings = [recorders.enter_context(recorded(server.base_url, template)) for template, *_ in cases]
        orders = [
            order_of(url, env_id=env_id, args=args, model=model, template=template, grammar=grammar)
            for (template, env_id, args, grammar, _, _), (url, _) in zip(cases, recordings, strict=True)
        ]
        rollouts = play(python, orders, tmp_path)
    for (template, _, _, _, num_turns, num_samples), (_, turns), rollout in zip(cases, recordings, rollouts, strict=True):
        assert len(turns) == rollout.num_turns == num_turns
        assert_trains_on_what_was_sampled(rollout, turns, tokenizer=make_model_tokenizer(template))
        assert len(rollout.samples) == num_samples
    assert [message["role"] for message in rollouts[-1].completion] == ["assistant", "tool"] * 2 + ["assistant"]
