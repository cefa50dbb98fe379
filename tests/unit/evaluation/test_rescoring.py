"""Saved rollouts are scored by a pool that answers at once, and compared with what was saved."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from trivet.environments.apis.messages import EXAMPLE_GONE
from trivet.errors import RolloutFailed, WorkerLost
from trivet.evaluation.rescoring import RescoredRollout, SavedFile, compare, most_changed, rescore
from trivet.wire.groups import GroupRequest
from trivet.wire.rollouts import Rollout, RolloutRecord


def row(group_id: int, index: int, *, env: str = "toy", reward: float = 0.0, is_truncated: bool = False) -> RolloutRecord:
    return RolloutRecord(
        env=env,
        group_id=group_id,
        example_id=group_id,
        index=index,
        reward=reward,
        scores={"exact": reward},
        is_truncated=is_truncated,
        prompt=[{"role": "user", "content": "q"}],
        completion=[{"role": "assistant", "content": f"answer {group_id}"}],
    )


class Pool:
    """Gives each rollout its example's id as its reward; example 7 is gone, example 8 fails, and example 9 is lost once."""

    def __init__(self) -> None:
        self.requests: list[GroupRequest] = []

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        self.requests.append(request)
        if request.example_id == 7:
            raise RolloutFailed("example 7 is gone", kind=EXAMPLE_GONE)
        if request.example_id == 8:
            raise RolloutFailed("reward function exact: KeyError: 'x'", kind="KeyError")
        if request.example_id == 9 and len([one for one in self.requests if one.example_id == 9]) == 1:
            raise WorkerLost("the worker ended")
        value = float(request.example_id)
        return [Rollout(index=index, reward=value, scores={"exact": value}) for index in range(request.num_rollouts)]


def score(tmp_path: Path, rows: Sequence[RolloutRecord], *, envs: Sequence[str] = ("toy",), zeroes: bool = False):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in rows))
    pool = Pool()
    found = asyncio.run(rescore(pool, SavedFile(path=path, step=3), envs=envs, zeroes_truncated=zeroes))  # type: ignore[arg-type]
    return found, pool


def test_a_group_is_scored_together_in_the_order_of_its_rollouts(tmp_path: Path) -> None:
    found, pool = score(tmp_path, [row(1, 1), row(1, 0), row(2, 0)])
    assert [(one.group_id, one.index, one.reward_after) for one in found] == [(1, 0, 1.0), (1, 1, 1.0), (2, 0, 2.0)]
    assert [(len(request.recorded), request.num_rollouts) for request in pool.requests] == [(2, 2), (1, 1)]


def test_rollouts_of_other_environments_are_left_out(tmp_path: Path) -> None:
    found, _ = score(tmp_path, [row(1, 0), row(2, 0, env="other")])
    assert [one.group_id for one in found] == [1]


def test_a_group_that_was_lost_with_its_worker_is_scored_again(tmp_path: Path) -> None:
    [found], pool = score(tmp_path, [row(9, 0)])
    assert (found.reward_after, len(pool.requests)) == (9.0, 2)


def test_a_rollout_that_was_cut_gets_zero_where_the_run_gave_it_zero(tmp_path: Path) -> None:
    found, _ = score(tmp_path, [row(2, 0, is_truncated=True), row(2, 1)], zeroes=True)
    assert [one.reward_after for one in found] == [0.0, 2.0]


def test_means_and_changes_are_of_the_rollouts_that_were_scored(tmp_path: Path) -> None:
    rows = [row(1, 0, reward=1.0), row(2, 0), row(2, 1, reward=2.0), row(7, 0), row(7, 1), row(8, 0, reward=5.0)]
    found, _ = score(tmp_path, rows)
    [change] = compare(found)
    assert (change.num_rollouts, change.num_scored, change.num_changed, change.num_failed) == (6, 3, 1, 1)
    assert change.not_comparable == {"example gone": 2}
    assert "KeyError" in change.first_error
    reward, exact = change.functions
    assert (reward.name, reward.mean_before, reward.num_changed) == ("reward", 1.0, 1)
    assert reward.mean_after == pytest.approx(5 / 3)
    assert (exact.name, exact.num_rollouts) == ("exact", 3)


def rescored(reward: tuple[float, float | None], before: dict[str, float], after: dict[str, float]) -> RescoredRollout:
    return RescoredRollout(
        step=1,
        env="toy",
        group_id=0,
        example_id=0,
        index=0,
        reward_before=reward[0],
        reward_after=reward[1],
        scores_before=before,
        scores_after=after,
        completion="",
    )


def test_a_function_that_exists_only_then_or_only_today_has_one_mean() -> None:
    [change] = compare([rescored((1.0, 1.0), {"old": 1.0}, {"new": 0.5})])
    found = [(one.name, one.mean_before, one.mean_after, one.num_rollouts) for one in change.functions]
    assert found == [("reward", 1.0, 1.0, 1), ("new", None, 0.5, 0), ("old", 1.0, None, 0)]


def test_the_most_changed_have_the_largest_change_of_reward_and_then_of_a_function() -> None:
    same = rescored((1.0, 1.0 + 1e-9), {}, {})
    function = rescored((1.0, 1.0), {"a": 0.0}, {"a": 9.0})
    little, much = rescored((1.0, 0.9), {}, {}), rescored((0.0, 1.0), {}, {})
    unscored = rescored((1.0, None), {}, {})
    assert most_changed([same, function, little, unscored, much], limit=5) == [much, little, function]
    assert most_changed([little, much], limit=1) == [much]
