"""Plays an environment with policies that need no model, and with the user's model: what `trivet env test` measures.

Every group runs in a worker process, as in a run. The workers are started twice, and the same replies are given both times, so a
reward or a data set that differs between processes shows.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np

from trivet.config.schema.environment import EnvWorkersConfig
from trivet.environments.examples import describe_difference
from trivet.environments.workers.pool import WorkerPool, open_worker_pool
from trivet.errors import EnvironmentLoadError, RolloutFailed, WorkerLost
from trivet.evaluation.scripted_policies import SCRIPTED, PolicyKind, Script, find_forms
from trivet.evaluation.scripted_server import ScriptedServer, serve_scripts
from trivet.wire.groups import EnvironmentInfo, Example, GroupRequest, SamplingArguments, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import GroupId
from trivet.wire.workers import HostSettings

_MAX_CONCURRENT_GROUPS = 16
_EXAMPLES_FOR_FORM = 4
"""Examples on which each form of an answer is tried."""
_SAMPLED = (PolicyKind.RANDOM, PolicyKind.MODEL)
"""The policies that reply differently in each rollout of a group."""


class PolicyResult(msgspec.Struct, kw_only=True):
    """The rewards and times of one policy."""

    rewards: dict[int, list[float]] = {}
    """Rewards of the rollouts by example, of the groups that were scored."""
    num_failed: int = 0
    first_error: str = ""
    num_turns: float = 0.0
    """Mean over rollouts."""
    seconds: float = 0.0
    """Mean time to play and score one rollout."""

    @property
    def mean(self) -> float | None:
        """Return the mean reward; None without a scored rollout."""
        found = [reward for group in self.rewards.values() for reward in group]
        return float(np.mean(found)) if found else None

    @property
    def share_without_signal(self) -> float | None:
        """Return the share of groups whose rollouts all got one reward; None unless groups have several rollouts."""
        groups = [group for group in self.rewards.values() if len(group) > 1]
        return float(np.mean([max(group) - min(group) < 1e-9 for group in groups])) if groups else None


class EnvironmentTest(msgspec.Struct, kw_only=True):
    """The measurements of one environment."""

    info: EnvironmentInfo
    num_tested: int
    """Examples that were played."""
    num_answers: int
    """Of them, those with a reference answer."""
    form: str
    """The form of an answer that got the most, for `str.format`."""
    results: dict[PolicyKind, PolicyResult]
    data_difference: str | None
    """How the data differ after the workers were started again; None if they do not."""
    num_compared: int
    """Rollouts that were played twice with the same replies."""
    changed: dict[PolicyKind, float]
    """The largest change of a reward between the two times, of the policies with a change."""


async def run_environment_test(
    settings: HostSettings,
    *,
    num_examples: int,
    rollouts_per_example: int,
    log: Path,
    limits: EnvWorkersConfig,
    model: HostSettings | None = None,
    sampling: SamplingArguments | None = None,
) -> EnvironmentTest:
    """Measure an environment.

    Args:
        settings: those of its host, with the address of no server.
        rollouts_per_example: of the policies that reply differently each time.
        log: the file of the workers' output.
        model: the same settings with the server of the user's model; None: only scripted policies play.
        sampling: that of the model.

    Raises:
        EnvironmentLoadError: the environment does not load, has no data, or its workers have different data.
    """
    with serve_scripts() as server:
        scripted = _with_server(settings, server)

        async def play_all(pool: WorkerPool, examples: Mapping[int, Example]) -> dict[PolicyKind, PolicyResult]:
            policies = [policy for policy in SCRIPTED if policy is not PolicyKind.GOLD or any(_answers(examples))]
            groups = {
                policy: {
                    example_id: (server.base_url(policy, example_id), rollouts_per_example if policy in _SAMPLED else 1)
                    for example_id, example in examples.items()
                    if policy is not PolicyKind.GOLD or example.answer
                }
                for policy in policies
            }
            return {policy: await _play(pool, settings.name, asked) for policy, asked in groups.items()}

        async with _RunningPool(scripted, log, limits) as pool:
            info = pool.infos[settings.name]
            if not info.num_examples:
                raise EnvironmentLoadError(f"environment {settings.name!r} has no examples to train on; check its args")
            chosen = np.unique(np.linspace(0, info.num_examples - 1, num_examples).astype(int)).tolist()
            examples = {
                example_id: await pool.example(settings.name, split=Split.TRAIN, example_id=example_id) for example_id in chosen
            }
            form = await _choose_form(pool, settings.name, server, examples)
            server.scripts = _scripts(examples, form=form)
            first = await play_all(pool, examples)
        async with _RunningPool(scripted, log, limits) as pool:
            difference = describe_difference(info, pool.infos[settings.name])
            second = await play_all(pool, examples)
    results = dict(first)
    if model is not None:
        async with _RunningPool(model, log, limits) as pool:
            asked = dict.fromkeys(examples, (model.servers.base_urls[0], rollouts_per_example))
            results[PolicyKind.MODEL] = await _play(pool, settings.name, asked, sampling=sampling)
    changes = {policy: _largest_change(first[policy], second[policy]) for policy in first}
    return EnvironmentTest(
        info=msgspec.structs.replace(info, example_hashes=[]),
        num_tested=len(examples),
        num_answers=sum(map(bool, _answers(examples))),
        form=form,
        results=results,
        data_difference=difference,
        num_compared=sum(len(group) for result in first.values() for group in result.rewards.values()),
        changed={policy: change for policy, change in changes.items() if change},
    )


class _RunningPool:
    """A pool whose workers are kept alive for a block."""

    def __init__(self, settings: HostSettings, log: Path, limits: EnvWorkersConfig) -> None:
        self._opening = open_worker_pool([settings], log_of=lambda _: log, limits=limits)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> WorkerPool:
        pool = await self._stack.enter_async_context(self._opening)
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._supervision = tasks.create_task(pool.run(), name="workers")
        return pool

    async def __aexit__(self, *error: object) -> bool | None:
        self._supervision.cancel()
        return await self._stack.__aexit__(*error)  # type: ignore[arg-type]  # the three arguments of a context manager


def _with_server(settings: HostSettings, server: ScriptedServer) -> HostSettings:
    servers = msgspec.structs.replace(settings.servers, base_urls=[server.root])
    return msgspec.structs.replace(settings, servers=servers, is_plain=True)


def _answers(examples: Mapping[int, Example]) -> list[str]:
    return [example.answer for example in examples.values()]


def _scripts(examples: Mapping[int, Example], *, form: str) -> dict[int, Script]:
    answers = [answer for answer in _answers(examples) if answer]
    commonest = max(answers, key=answers.count, default="")
    return {
        example_id: Script(answer=example.answer, commonest=commonest, form=form) for example_id, example in examples.items()
    }


async def _choose_form(pool: WorkerPool, env: str, server: ScriptedServer, examples: Mapping[int, Example]) -> str:
    """Return the form of the reference answer that gets the highest reward; the first of them if all get the same."""
    answered = {example_id: example for example_id, example in examples.items() if example.answer}
    tried = dict(list(answered.items())[:_EXAMPLES_FOR_FORM])
    best_form, best_mean = "{}", -np.inf
    for form in find_forms(next(iter(examples.values())).prompt) if tried else ():
        server.scripts = _scripts(tried, form=form)
        asked = {example_id: (server.base_url(PolicyKind.GOLD, example_id), 1) for example_id in tried}
        mean = (await _play(pool, env, asked)).mean
        if mean is not None and mean > best_mean + 1e-9:
            best_form, best_mean = form, mean
    return best_form


async def _play(
    pool: WorkerPool, env: str, asked: Mapping[int, tuple[str, int]], *, sampling: SamplingArguments | None = None
) -> PolicyResult:
    """Run one group for each example.

    Args:
        asked: base URL and number of rollouts, by example.
    """
    slots, result = asyncio.Semaphore(_MAX_CONCURRENT_GROUPS), PolicyResult()
    rollouts: list[Rollout] = []

    async def play(example_id: int, base_url: str, num_rollouts: int) -> None:
        request = GroupRequest(
            group_id=GroupId(example_id),
            env=env,
            example_id=example_id,
            num_rollouts=num_rollouts,
            base_url=base_url,
            sampling=sampling or SamplingArguments(temperature=1.0, seed=0),
        )
        async with slots:
            while True:
                try:
                    played = await pool.run_group(request)
                except WorkerLost:  # the third loss raises RolloutFailed instead
                    continue
                except RolloutFailed as exc:
                    result.num_failed += 1
                    result.first_error = result.first_error or str(exc)
                else:
                    result.rewards[example_id] = [rollout.reward for rollout in played]
                    rollouts.extend(played)
                return

    async with asyncio.TaskGroup() as tasks:
        for example_id, (base_url, num_rollouts) in asked.items():
            tasks.create_task(play(example_id, base_url, num_rollouts), name=f"play-{example_id}")
    if rollouts:
        result.num_turns = float(np.mean([rollout.num_turns for rollout in rollouts]))
        result.seconds = float(np.mean([rollout.generation_s + rollout.scoring_s for rollout in rollouts]))
    return result


def _largest_change(first: PolicyResult, second: PolicyResult) -> float:
    pairs: Sequence[tuple[float, float]] = [
        pair
        for example_id in first.rewards.keys() & second.rewards.keys()
        for pair in zip(first.rewards[example_id], second.rewards[example_id], strict=True)
    ]
    largest = max((abs(before - after) for before, after in pairs), default=0.0)
    return largest if largest > 1e-9 else 0.0
