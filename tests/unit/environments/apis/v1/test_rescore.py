"""Recorded rollouts of v1 tasks are scored again, with verifiers 0.4: see test_host.py."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from trivet.environments.apis.load import FIRST_V1_RELEASE, load_host, require_release
from trivet.environments.apis.messages import EXAMPLE_GONE, PROMPT_DIFFERS
from trivet.errors import RolloutFailed
from trivet.wire.groups import GroupRequest, RecordedConversation, SamplingArguments, ServerAccess
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import GroupId
from trivet.wire.workers import HostSettings

if require_release("talks") < FIRST_V1_RELEASE:
    pytest.skip("needs verifiers 0.4", allow_module_level=True)

QUESTION = [{"role": "user", "content": "What is two and three?"}]
ANSWERS = [
    {"role": "assistant", "content": "Five"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes"},
]


@pytest.fixture(autouse=True)
def _environments_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "support" / "environments"))


def rescore(
    row: dict[str, Any], *, example_id: int = 0, prompt: list[dict[str, Any]] = QUESTION, hook: Any = None
) -> list[Rollout]:
    servers = ServerAccess(base_urls=["http://127.0.0.1:9"], key_variables=["OPENAI_API_KEY"])
    host: Any = load_host(
        HostSettings(env_id="talks", name="toy", args={"rows": [row]}, model_name="m", servers=servers), environ=os.environ
    )
    if hook is not None:
        host.tasks[0].hooks = lambda attr: [hook] if attr == "reward" else []
    recorded = RecordedConversation(prompt=prompt, completion=ANSWERS)
    request = GroupRequest(
        group_id=GroupId(1),
        env="toy",
        example_id=example_id,
        num_rollouts=2,
        base_url="",
        sampling=SamplingArguments(temperature=None),
        recorded=[recorded, recorded],
    )

    async def go() -> list[Rollout]:
        async with host.serving():
            return await host.run_group(request)

    return asyncio.run(go())


def test_rewards_and_metrics_are_those_of_todays_task() -> None:
    first, second = rescore({"score": "0.25"})
    assert (first.reward, first.scores, first.num_turns) == (0.25, {"scored": 0.25, "num_replies": 2.0}, 2)
    assert (second.index, second.reward) == (1, 0.25)


def test_a_reward_function_that_raises_is_named() -> None:
    with pytest.raises(RolloutFailed, match="reward function scored of environment 'toy': LookupError: no such answer"):
        rescore({"score": "raise"})


def test_a_function_that_needs_the_runtime_is_refused_by_name() -> None:
    async def runs_the_tests(runtime: Any) -> float:
        return 1.0

    with pytest.raises(RolloutFailed, match="need the runtime of the episode, which is gone: runs_the_tests"):
        rescore({}, hook=runs_the_tests)


@pytest.mark.parametrize(
    ("given", "kind"),
    [({"example_id": 3}, EXAMPLE_GONE), ({"prompt": [{"role": "user", "content": "?"}]}, PROMPT_DIFFERS)],
)
def test_a_task_that_is_gone_or_asks_something_else_is_not_comparable(given: dict[str, Any], kind: str) -> None:
    with pytest.raises(RolloutFailed) as caught:
        rescore({}, **given)
    assert caught.value.kind == kind
