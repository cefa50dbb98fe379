"""Plays an environment with policies that need no model, and with the user's model: what `trivet env test` measures.

Every group runs in a worker process, as in a run. The workers are started twice, and the same replies are given both times, so a
reward or a data set that differs between processes shows.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np

from trivet.config.schema.environment import EnvConfig, EnvWorkersConfig
from trivet.config.schema.inference import ClientConfig
from trivet.environments.examples import describe_difference
from trivet.environments.settings import host_settings
from trivet.environments.workers.pool import WorkerPool, open_worker_pool
from trivet.errors import EnvironmentLoadError, RolloutFailed, WorkerLost
from trivet.evaluation.scripted_policies import PolicyKind, Script, find_forms
from trivet.evaluation.scripted_server import ScriptedServer, serve_scripts
from trivet.wire.groups import Example, GroupRequest, SamplingArguments, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import GroupId

_MAX_CONCURRENT_GROUPS = 16
_ROLLOUT_TIMEOUT_S = 600.0
"""The longest time for a group. An environment that starts a program for every rollout needs minutes on a busy machine."""
_NUM_READ = 64
"""Examples that are read. The constant policy's answer is the commonest of those that are not played: on few played examples the
commonest of their own answers would be right by itself."""
_EXAMPLES_FOR_FORM = 2
"""Examples on which each form of an answer is tried. Every form costs so many rollouts before the test begins."""


class PolicyResult(msgspec.Struct, kw_only=True):
    """The rewards and times of one policy."""

    policy: PolicyKind
    rewards: dict[int, list[float]] = {}
    """Rewards of the rollouts by example, of the groups that were scored."""
    mean_reward: float | None = None
    share_without_signal: float | None = None
    """Share of the groups whose rollouts all got one reward; None unless groups have several rollouts."""
    mean_turns: float = 0.0
    seconds_per_rollout: float = 0.0
    """Mean time to play and score a rollout."""
    errors: list[str] = []
    """Why groups failed."""


class EnvironmentTest(msgspec.Struct, kw_only=True):
    """The measurements of one environment."""

    environment: str
    num_examples: int
    num_eval_examples: int
    num_tested: int
    """Examples that were played."""
    num_answers: int
    """Of them, those with a reference answer."""
    answer_form: str
    """The form of an answer that got the most, for `str.format`."""
    policies: list[PolicyResult]
    data_difference: str | None
    """How the data differ after the workers were started again; None if they do not."""
    largest_changes: dict[PolicyKind, float]
    """The largest change of a reward after the second start, of the policies with a change."""


async def run_environment_test(
    env: EnvConfig,
    *,
    num_examples: int,
    rollouts_per_example: int,
    log: Path,
    model: tuple[str, str] | None = None,
    max_tokens: int = 512,
) -> EnvironmentTest:
    """Measure an environment.

    Args:
        rollouts_per_example: of the policies that reply differently each time.
        log: the file of the workers' output.
        model: base URL of a server, and the name of the model that plays too; None: only scripted policies play.
        max_tokens: of a turn of that model.

    Raises:
        EnvironmentLoadError: the environment does not load, has no data, or its workers have different data.
    """

    @asynccontextmanager
    async def run_workers(base_url: str, *, model_name: str = "scripted") -> AsyncIterator[WorkerPool]:
        client = ClientConfig(base_url=[base_url])
        settings = host_settings(env, model_name=model_name, client=client, rollout_timeout_s=_ROLLOUT_TIMEOUT_S, is_plain=True)
        opening = open_worker_pool([settings], log_of=lambda _: log, limits=EnvWorkersConfig())
        async with opening as pool, asyncio.TaskGroup() as tasks:
            supervision = tasks.create_task(pool.run(), name="workers")
            yield pool
            supervision.cancel()

    async def play_all(pool: WorkerPool, server: ScriptedServer) -> list[PolicyResult]:
        results: list[PolicyResult] = []
        for policy in (policy for policy in PolicyKind if policy is not PolicyKind.MODEL):
            played = server.scripts if policy is not PolicyKind.GOLD else [i for i, it in server.scripts.items() if it.answer]
            urls = {example_id: server.base_url(policy, example_id) for example_id in played}
            if urls:
                num_rollouts = rollouts_per_example if policy is PolicyKind.RANDOM else 1
                results.append(await _play(pool, env.label, policy, urls, num_rollouts=num_rollouts))
        return results

    async with serve_scripts() as server:
        async with run_workers(server.root) as pool:
            info = pool.infos[env.label]
            if not info.num_examples:
                raise EnvironmentLoadError(f"environment {env.label!r} has no examples to train on; check its args")
            numbers = _spread(info.num_examples, max(num_examples, _NUM_READ))
            read = {number: await pool.example(env.label, split=Split.TRAIN, example_id=number) for number in numbers}
            examples = {numbers[index]: read[numbers[index]] for index in _spread(len(numbers), num_examples)}
            others = [example.answer for number, example in read.items() if example.answer and number not in examples]
            commonest = max(others, key=others.count, default="")
            form = await _choose_form(pool, env.label, server, examples)
            server.scripts = _write_scripts(examples, commonest=commonest, form=form)
            first = await play_all(pool, server)
        async with run_workers(server.root) as pool:
            difference = describe_difference(info, pool.infos[env.label])
            second = await play_all(pool, server)
    results = list(first)
    if model is not None:
        base_url, model_name = model
        sampling = SamplingArguments(temperature=1.0, fields={"max_tokens": max_tokens})
        async with run_workers(base_url, model_name=model_name) as pool:
            urls = dict.fromkeys(examples, base_url)
            results.append(
                await _play(pool, env.label, PolicyKind.MODEL, urls, num_rollouts=rollouts_per_example, sampling=sampling)
            )
    changes = {before.policy: _largest_change(before, after) for before, after in zip(first, second, strict=True)}
    return EnvironmentTest(
        environment=env.label,
        num_examples=info.num_examples,
        num_eval_examples=info.num_eval_examples,
        num_tested=len(examples),
        num_answers=sum(bool(example.answer) for example in examples.values()),
        answer_form=form,
        policies=results,
        data_difference=difference,
        largest_changes={policy: change for policy, change in changes.items() if change > 1e-9},
    )


def _spread(size: int, count: int) -> list[int]:
    """Return at most `count` numbers below `size`, evenly spread."""
    return np.unique(np.linspace(0, size - 1, count).astype(int)).tolist()


def _write_scripts(examples: Mapping[int, Example], *, form: str, commonest: str = "") -> dict[int, Script]:
    return {number: Script(answer=example.answer, commonest=commonest, form=form) for number, example in examples.items()}


async def _choose_form(pool: WorkerPool, env: str, server: ScriptedServer, examples: Mapping[int, Example]) -> str:
    """Return the form of the reference answer that gets the highest reward; the first of them if all get the same."""
    tried = dict([item for item in examples.items() if item[1].answer][:_EXAMPLES_FOR_FORM])
    best_form, best_mean = "{}", -np.inf
    for form in find_forms(next(iter(examples.values())).prompt) if tried else ():
        server.scripts = _write_scripts(tried, form=form)
        urls = {example_id: server.base_url(PolicyKind.GOLD, example_id) for example_id in tried}
        mean = (await _play(pool, env, PolicyKind.GOLD, urls)).mean_reward
        if mean is not None and mean > best_mean + 1e-9:
            best_form, best_mean = form, mean
    return best_form


async def _play(
    pool: WorkerPool,
    env: str,
    policy: PolicyKind,
    urls: Mapping[int, str],
    *,
    num_rollouts: int = 1,
    sampling: SamplingArguments | None = None,
) -> PolicyResult:
    """Run one group for each example. `urls` has the base URL of the policy by example."""
    slots, groups, errors = asyncio.Semaphore(_MAX_CONCURRENT_GROUPS), dict[int, Sequence[Rollout]](), list[str]()

    async def play(example_id: int, base_url: str) -> None:
        request = GroupRequest(
            group_id=GroupId(example_id),
            env=env,
            example_id=example_id,
            num_rollouts=num_rollouts,
            base_url=base_url,
            sampling=sampling or SamplingArguments(temperature=1.0, seed=0),
        )
        async with slots:
            try:
                groups[example_id] = await pool.run_group(request)
            except (RolloutFailed, WorkerLost) as exc:
                errors.append(str(exc))

    async with asyncio.TaskGroup() as tasks:
        for example_id, base_url in urls.items():
            tasks.create_task(play(example_id, base_url), name=f"play-{example_id}")
    result = PolicyResult(policy=policy, errors=errors)
    if rollouts := [rollout for group in groups.values() for rollout in group]:
        result.rewards = {example_id: [rollout.reward for rollout in group] for example_id, group in sorted(groups.items())}
        result.mean_reward = float(np.mean([rollout.reward for rollout in rollouts]))
        result.mean_turns = float(np.mean([rollout.num_turns for rollout in rollouts]))
        result.seconds_per_rollout = float(np.mean([rollout.generation_s + rollout.scoring_s for rollout in rollouts]))
        if num_rollouts > 1:
            result.share_without_signal = float(np.mean([np.ptp(rewards) < 1e-9 for rewards in result.rewards.values()]))
    return result


def _largest_change(first: PolicyResult, second: PolicyResult) -> float:
    compared = first.rewards.keys() & second.rewards.keys()
    return max(
        (float(np.abs(np.subtract(first.rewards[number], second.rewards[number])).max()) for number in compared), default=0.0
    )
