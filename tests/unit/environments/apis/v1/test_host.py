"""Environments of the v1 API, played with verifiers 0.4: what is trained on is what the server read and sampled, token for token.

It needs verifiers 0.4, which has no place beside the release of the v0 API. `integration/test_verifiers_releases.py` runs it in a
virtual environment of its own.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from trivet.algorithms.arithmetic import derive_seed
from trivet.environments.apis.load import FIRST_V1_RELEASE, EnvironmentHost, load_host, require_release
from trivet.errors import EnvironmentLoadError, RolloutFailed
from trivet.wire.groups import GroupRequest, SamplingArguments, ServerAccess, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import GroupId
from trivet.wire.workers import HostSettings

if require_release("talks") < FIRST_V1_RELEASE:
    pytest.skip("needs verifiers 0.4", allow_module_level=True)

from support.served_turns import assert_trains_on_what_was_sampled
from support.template_conversations import CONVERSATIONS, IM_END, TemplateConversation
from support.template_server import TemplateServer
from trivet.environments.apis import groups

ROOT = Path(__file__).parents[5]
Case = tuple[TemplateConversation, dict[str, Any]]
CASES: dict[str, Case] = {
    **{
        name: (case, {"way": "tools"} if case.has_tool else {"lines": list(case.lines)}) for name, case in CONVERSATIONS.items()
    },
    "one turn": (TemplateConversation("chatml", ["Five" + IM_END], 1), {}),
    "streamed": (
        TemplateConversation("chatml", ["Five" + IM_END, "Yes" + IM_END], 1),
        {"way": "stream", "lines": ["Sure?"]},
    ),
    "branches": (
        TemplateConversation("chatml", ["Five" + IM_END, "Yes" + IM_END, "No" + IM_END], 2),
        {"way": "branch", "lines": ["Sure?", "Why?"]},
    ),
}
"""Conversations, each with the task in which it is played."""


@pytest.fixture(autouse=True)
def _environments_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_RETRY_DELAY_S", 0.0)
    for directory in (ROOT / "tests" / "support" / "environments", ROOT / "environments" / "count_letters"):
        monkeypatch.syspath_prepend(str(directory))


def host_of(url: str, env_id: str, args: dict[str, Any], **fields: Any) -> EnvironmentHost:
    settings = HostSettings(
        env_id=env_id,
        name="toy",
        args=args,
        model_name="m",
        servers=ServerAccess(base_urls=[url], key_variables=["OPENAI_API_KEY"]),
        hash_keys=["task", "prompt"],
        **fields,
    )
    return load_host(settings, environ=os.environ)


def play(
    server: TemplateServer,
    args: dict[str, Any],
    *,
    env_id: str = "talks",
    num_rollouts: int = 1,
    seed: int | None = None,
    **fields: Any,
) -> list[Rollout]:
    with server.served_url() as url:
        host = host_of(url, env_id, args, **fields)
        request = GroupRequest(
            group_id=GroupId(4),
            env="toy",
            example_id=0,
            num_rollouts=num_rollouts,
            base_url=url,
            sampling=SamplingArguments(temperature=0.5, seed=seed, fields={"max_tokens": 64, "top_k": -1}),
        )

        async def scenario() -> list[Rollout]:
            async with host.serving():
                return await host.run_group(request)

        rollouts = asyncio.run(scenario())
        assert len(host._turns) == 0  # type: ignore[attr-defined]  nothing of a group that is over is kept
        return rollouts


def play_case(name: str, **options: Any) -> tuple[Rollout, TemplateServer]:
    case, row = CASES[name]
    server = TemplateServer(case.template, answers=case.answers, seed=2, parses_reasoning=case.parses_reasoning)
    [rollout] = play(server, {"rows": [row]}, **options)
    return rollout, server


@pytest.mark.parametrize("strategy", ["interleaved", "branching"])
@pytest.mark.parametrize("name", CASES)
def test_training_tokens_are_those_read_and_sampled(name: str, strategy: str) -> None:
    case, _ = CASES[name]
    rollout, server = play_case(name, trajectory_strategy=strategy)
    assert len(server.turns) == rollout.num_turns == len(case.answers)
    assert_trains_on_what_was_sampled(rollout, server.turns, tokenizer=server.tokenizer)
    assert len(rollout.samples) == (case.num_samples if strategy == "interleaved" else len(case.answers))
    assert (rollout.reward, rollout.scores["num_replies"]) == (1.0, float(len(case.answers)))
    assert {sample.temperature for sample in rollout.samples} == {0.5}


@pytest.mark.parametrize("name", CASES)
def test_verifiers_own_view_of_the_trace_has_the_same_tokens(name: str) -> None:
    rollout, server = play_case(name)
    import talks  # pyright: ignore[reportMissingImports]  its directory is on the path in this test

    branches = talks.seen[-1].branches
    ours = {tuple(sample.token_ids_T.tolist()) for sample in rollout.samples}
    assert {tuple(branch.token_ids) for branch in branches} == ours
    trained = sum(sample.num_loss_tokens for sample in rollout.samples)
    assert trained == sum(len(turn.sampled) for turn in server.turns)


def test_tokens_that_branches_share_are_trained_on_once() -> None:
    rollout, server = play_case("branches")
    first, second = rollout.samples
    shared = len(server.turns[0].read) + len(server.turns[0].sampled)
    assert first.token_ids_T[:shared].tolist() == second.token_ids_T[:shared].tolist()
    assert first.loss_mask_T[:shared].sum() == len(server.turns[0].sampled)
    assert second.loss_mask_T[:shared].sum() == 0


def test_each_turn_has_a_seed_of_its_own_that_depends_on_the_rollout_s() -> None:
    def seeds(seed: int) -> list[int | None]:
        return play_case("plain chat", seed=seed)[1].seeds

    assert len(set(seeds(1))) == 4
    assert seeds(1) == seeds(1)
    assert not set(seeds(1)) & set(seeds(2))
    server = TemplateServer("chatml", answers=["Five" + IM_END] * 2)
    play(server, {"rows": [{}]}, num_rollouts=2, seed=1)
    assert sorted(seed or 0 for seed in server.seeds) == sorted(derive_seed(1, GroupId(4), index) % 2**31 for index in range(2))


@pytest.mark.parametrize("room", [0, 1])
def test_a_conversation_that_outgrows_the_context_ends_as_truncated_and_keeps_its_turns(room: int) -> None:
    _, whole = play_case("plain chat")
    case, row = CASES["plain chat"]
    server = TemplateServer(case.template, answers=case.answers, seed=2, max_model_len=len(whole.turns[2].read) - room)
    [rollout] = play(server, {"rows": [row]})
    assert len(server.turns) == rollout.num_turns == 2
    assert rollout.ran_out_of_context
    assert rollout.reward == 1.0
    assert_trains_on_what_was_sampled(rollout, server.turns, tokenizer=server.tokenizer)


@pytest.mark.parametrize(
    ("score", "kind", "said"),
    [
        ("raise", "LookupError", "reward function scored of environment 'toy': LookupError: no such answer"),
        ("exit", "SystemExit", "reward function scored of environment 'toy': SystemExit: 3"),
        ("nested", "TypeError", r"returned the list \[0.25\], not a number"),
        ("1e20", "RewardTooLarge", r"scored of environment 'toy': RewardTooLarge: returned the float 1e\+20, too large"),
    ],
)
def test_an_error_of_a_reward_function_fails_its_group_without_a_second_attempt(score: str, kind: str, said: str) -> None:
    server = TemplateServer("chatml", answers=["Five" + IM_END])
    with pytest.raises(RolloutFailed, match=said) as failed:
        play(server, {"rows": [{"score": score}]})
    assert failed.value.kind == kind
    assert len(server.turns) == 1


def test_rewards_by_name_are_added_up() -> None:
    [rollout] = play(TemplateServer("chatml", answers=["Five" + IM_END]), {"rows": [{"score": "named"}]})
    assert rollout.reward == 0.75
    assert rollout.scores == {"first": 0.25, "second": 0.5, "num_replies": 1.0}


def test_metrics_without_a_value_are_left_out_and_cost_nothing_else() -> None:
    [rollout] = play(TemplateServer("chatml", answers=["Five" + IM_END]), {"rows": [{"has_odd_metrics": True}]})
    assert rollout.reward == 1.0
    assert rollout.scores == {"scored": 1.0, "num_replies": 1.0}


def test_a_reward_function_that_does_not_end_is_named() -> None:
    server = TemplateServer("chatml", answers=["Five" + IM_END])
    with pytest.raises(RolloutFailed, match=r"reward function scored .* did not run to its end: scoring_timeout"):
        play(server, {"rows": [{"score": "hang"}], "agent": {"timeout": {"scoring": 0.2}}})


def test_an_error_of_a_reward_function_counts_zero_where_that_is_asked_for() -> None:
    [rollout] = play(
        TemplateServer("chatml", answers=["Five" + IM_END]), {"rows": [{"score": "raise"}]}, on_reward_error="zero"
    )
    assert rollout.reward == 0.0
    assert len(rollout.samples) == 1


@pytest.mark.parametrize(
    ("way", "is_infrastructure", "num_turns", "said"),
    [("crash", False, 1, "KeyError"), ("lose", True, 3, "SandboxError"), ("unlaunchable", True, 0, "no place for the harness")],
)
def test_only_what_infrastructure_failed_is_played_again(way: str, is_infrastructure: bool, num_turns: int, said: str) -> None:
    server = TemplateServer("chatml", answers=["Five" + IM_END] * 3)
    with pytest.raises(RolloutFailed, match=said) as failed:
        play(server, {"rows": [{"way": way}]})
    assert failed.value.is_infrastructure is is_infrastructure
    assert len(server.turns) == num_turns


def test_a_harness_that_speaks_another_api_is_refused_by_name() -> None:
    with pytest.raises(RolloutFailed, match="ProviderError: the harness speaks the Anthropic API"):
        play(TemplateServer("chatml", answers=[]), {"rows": [{"way": "anthropic"}]})


def test_an_environment_of_the_verifiers_package_runs_unchanged_and_its_agents_are_trajectories_of_one_rollout() -> None:
    answers = ["2" + IM_END, "7" + IM_END, "0" + IM_END]
    server = TemplateServer("chatml", answers=answers)
    args = {"taskset": {"id": "count-letters", "num_tasks": 5}, "n": 3}
    [rollout] = play(server, args, env_id="best-of-n", seed=3)
    assert_trains_on_what_was_sampled(rollout, server.turns, tokenizer=server.tokenizer)
    assert len(rollout.samples) == rollout.num_turns == 3
    assert rollout.scores["agent/pass_at_n"] in (0.0, 1.0)
    assert rollout.reward == rollout.scores["agent/reward"]
    assert len(set(server.seeds)) == 3  # with one seed, every attempt would say the same


def test_a_server_that_answers_text_alone_gives_scored_rollouts_without_samples() -> None:
    rollout, _ = play_case("plain chat", is_plain=True)
    assert (rollout.reward, rollout.samples, rollout.num_turns) == (1.0, [], 4)


def test_tasks_are_numbered_and_named_by_what_they_ask() -> None:
    rows = [{"prompt": text, "system_prompt": "Be short."} for text in ("a", "b", "a")]
    host = host_of("http://127.0.0.1:9", "talks", {"rows": rows})
    assert host.info.train_digest == host.info.eval_digest != ""
    first, second, third = host.info.example_hashes
    assert first == third != second
    assert (host.api, host.info.num_examples, host.info.num_eval_examples) == ("v1", 3, 3)
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "b"}]
    assert host.example(split=Split.TRAIN, example_id=1).prompt == asked
    chosen = host_of("http://127.0.0.1:9", "talks", {"rows": rows, "select": {"skip": 1, "limit": 1}})
    assert chosen.example(split=Split.EVAL, example_id=0).prompt == asked


def test_a_shell_for_the_model_needs_a_place_that_the_user_names() -> None:
    said = r"harness 'bash' of its agent 'agent' runs commands.*args\.agent\.runtime\.type"
    with pytest.raises(EnvironmentLoadError, match=said):
        host_of("http://127.0.0.1:9", "talks", {"agent": {"harness": {"id": "bash"}}})
    host_of("http://127.0.0.1:9", "talks", {"agent": {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}})


def test_a_taskset_that_is_missing_or_refuses_its_arguments_is_one_error() -> None:
    with pytest.raises(EnvironmentLoadError, match=r"env\.id = 'nowhere' is not installed"):
        host_of("http://127.0.0.1:9", "nowhere", {})
    with pytest.raises(EnvironmentLoadError, match="environment 'toy': loading the taskset of 'talks'"):
        host_of("http://127.0.0.1:9", "talks", {"colour": "red"})
