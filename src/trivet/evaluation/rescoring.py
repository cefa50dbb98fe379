"""Scores saved rollouts with today's reward functions, and compares the scores with the saved ones. Used by `trivet replay`.

`rescore` asks the workers of the environments; everything else is pure.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from trivet.environments.apis.rescoring import EXAMPLE_GONE, PROMPT_DIFFERS
from trivet.environments.port import EnvironmentPool
from trivet.errors import RolloutFailed, WorkerLost
from trivet.evaluation.saved_rollouts import SavedFile, SavedRollout
from trivet.telemetry.console import conversation_text
from trivet.wire.groups import GroupRequest, RecordedConversation, SamplingArguments
from trivet.wire.rollouts import GroupId, Rollout

REWARD = "reward"
"""Name under which the reward itself is listed with the reward functions."""
_NOT_COMPARABLE = {EXAMPLE_GONE: "example gone", PROMPT_DIFFERS: "prompt differs"}
_TOLERANCE = 1e-6
"""Scores that differ by less, relatively and absolutely, are equal: some rewards are sums in another order."""
_MAX_CONCURRENT_GROUPS = 64
"""Groups that are scored at the same time: enough for judges that wait for a service, and few enough for their limits."""
_PREVIEW_CHARS = 200


class RescoredRollout(msgspec.Struct, kw_only=True):
    """A saved rollout with its scores then and today: a line of the file that `--write` names."""

    step: int
    env: str
    group_id: int
    """-1 in an evaluation."""
    example_id: int
    index: int
    reward_before: float
    reward_after: float | None = None
    """None when the rollout was not scored."""
    scores_before: dict[str, float]
    scores_after: dict[str, float] = {}
    not_comparable: str = ""
    """`example gone` or `prompt differs`: today's data does not have what the rollout was sampled for."""
    error: str = ""
    """Why scoring failed; empty when it did not."""
    completion: str
    """The beginning of what the model said."""


class FunctionChange(msgspec.Struct, kw_only=True):
    """One reward function over the rollouts that it scored then and today."""

    name: str
    mean_before: float | None
    mean_after: float | None
    num_rollouts: int
    num_changed: int


class EnvironmentChange(msgspec.Struct, kw_only=True):
    """The differences in one environment."""

    env: str
    num_rollouts: int
    num_scored: int
    num_changed: int
    """Rollouts with another reward."""
    functions: list[FunctionChange]
    """The reward first, then the reward functions and metrics by name."""
    not_comparable: dict[str, int]
    """Rollouts by reason."""
    num_failed: int
    first_error: str = ""


async def rescore(
    pool: EnvironmentPool, file: SavedFile, *, envs: Iterable[str], zeroes_truncated: bool
) -> list[RescoredRollout]:
    """Score the rollouts of a file in the workers of their environments.

    Args:
        envs: names of the environments to score; rollouts of others are left out.
        zeroes_truncated: a rollout that was cut got reward 0 (`zero_truncated_completions`), and gets it again.
    """
    slots, wanted = asyncio.Semaphore(_MAX_CONCURRENT_GROUPS), set(envs)

    async def score(number: int, env: str, rows: list[SavedRollout]) -> list[RescoredRollout]:
        request = _make_request(file, number, env, rows)
        async with slots:
            try:
                rollouts = await _run(pool, request)
            except RolloutFailed as exc:
                return [_failed(file, env, row, exc) for row in rows]
        return [
            _rescored(file, env, row, rollout, is_zeroed=zeroes_truncated and row.is_truncated)
            for row, rollout in zip(rows, rollouts, strict=True)
        ]

    async with asyncio.TaskGroup() as tasks:
        scored = [
            tasks.create_task(score(number, env, rows), name=f"score-{number}")
            for number, (env, rows) in enumerate(file.groups())
            if env in wanted
        ]
    return [one for task in scored for one in task.result()]


def compare(rescored: Sequence[RescoredRollout]) -> list[EnvironmentChange]:
    """Return the differences by environment, in the order of their names."""
    return [_compare_one(env, [one for one in rescored if one.env == env]) for env in sorted({one.env for one in rescored})]


def most_changed(rescored: Iterable[RescoredRollout], *, limit: int) -> list[RescoredRollout]:
    """Return the rollouts whose reward, and then whose reward functions, changed most; none that did not change."""
    ranked = [(_size(one), one) for one in rescored if one.reward_after is not None]
    changed = [(size, one) for size, one in ranked if size > (0.0, 0.0)]
    return [one for _, one in sorted(changed, key=lambda pair: pair[0], reverse=True)[:limit]]


def _size(one: RescoredRollout) -> tuple[float, float]:
    sizes = {name: abs(before - after) for name, before, after in _pairs(one) if not _is_equal(before, after)}
    return sizes.get(REWARD, 0.0), max(sizes.values(), default=0.0)


def _compare_one(env: str, rescored: Sequence[RescoredRollout]) -> EnvironmentChange:
    scored = [one for one in rescored if one.reward_after is not None]
    failed = [one for one in rescored if one.error]
    values: dict[str, list[tuple[float, float]]] = {REWARD: []}
    for one in scored:
        for name, before, after in _pairs(one):
            values.setdefault(name, []).append((before, after))
    for name in sorted({name for one in scored for name in one.scores_before.keys() ^ one.scores_after.keys()}):
        values.setdefault(name, [])
    names = [REWARD, *sorted(values.keys() - {REWARD})]
    functions = [_change_of(name, values[name], scored) for name in names]
    return EnvironmentChange(
        env=env,
        num_rollouts=len(rescored),
        num_scored=len(scored),
        num_changed=functions[0].num_changed,
        functions=functions,
        not_comparable=dict(Counter(one.not_comparable for one in rescored if one.not_comparable)),
        num_failed=len(failed),
        first_error=failed[0].error if failed else "",
    )


def _change_of(name: str, pairs: Sequence[tuple[float, float]], scored: Sequence[RescoredRollout]) -> FunctionChange:
    """Return the change of one function; where it scored no rollout both times, the mean of the time when it did."""
    before = [pair[0] for pair in pairs] or [one.scores_before[name] for one in scored if name in one.scores_before]
    after = [pair[1] for pair in pairs] or [one.scores_after[name] for one in scored if name in one.scores_after]
    return FunctionChange(
        name=name,
        mean_before=_mean(before),
        mean_after=_mean(after),
        num_rollouts=len(pairs),
        num_changed=sum(not _is_equal(*pair) for pair in pairs),
    )


def _pairs(one: RescoredRollout) -> Iterator[tuple[str, float, float]]:
    if one.reward_after is not None:
        yield REWARD, one.reward_before, one.reward_after
    for name in one.scores_before.keys() & one.scores_after.keys():
        yield name, one.scores_before[name], one.scores_after[name]


def _is_equal(before: float, after: float) -> bool:
    return math.isclose(before, after, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


async def _run(pool: EnvironmentPool, request: GroupRequest) -> list[Rollout]:
    """Score a group; one that is lost with its worker is tried again, until the pool treats it as the cause."""
    while True:
        try:
            return await pool.run_group(request)
        except WorkerLost:
            continue


def _make_request(file: SavedFile, number: int, env: str, rows: Sequence[SavedRollout]) -> GroupRequest:
    return GroupRequest(
        group_id=GroupId(number),
        env=env,
        split=file.split,
        example_id=rows[0].example_id,
        num_rollouts=len(rows),
        base_url="http://127.0.0.1:9/v1",  # the discard port: nothing is asked
        sampling=SamplingArguments(temperature=None),
        recorded=[
            RecordedConversation(prompt=row.prompt, completion=row.completion, is_truncated=row.is_truncated) for row in rows
        ],
    )


def _rescored(file: SavedFile, env: str, row: SavedRollout, rollout: Rollout, *, is_zeroed: bool) -> RescoredRollout:
    made = _record(file, env, row)
    made.reward_after, made.scores_after = 0.0 if is_zeroed else rollout.reward, rollout.scores
    return made


def _failed(file: SavedFile, env: str, row: SavedRollout, error: RolloutFailed) -> RescoredRollout:
    made = _record(file, env, row)
    made.not_comparable = _NOT_COMPARABLE.get(error.kind, "")
    made.error = "" if made.not_comparable else str(error)
    return made


def _record(file: SavedFile, env: str, row: SavedRollout) -> RescoredRollout:
    return RescoredRollout(
        step=file.step,
        env=env,
        group_id=row.group_id,
        example_id=row.example_id,
        index=row.index,
        reward_before=row.reward,
        scores_before=row.scores,
        completion=conversation_text(row.completion, max_chars=_PREVIEW_CHARS),
    )
