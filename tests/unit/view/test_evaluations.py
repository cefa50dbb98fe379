import time
from contextlib import closing
from pathlib import Path

import pytest

from support.evaluations import write_evaluation, write_vf_results
from trivet.errors import ConfigError
from trivet.view.evaluations import PAIR_FILTERS, PAIR_SORTS, find_evaluations, pair_rollouts
from trivet.view.rollouts import RolloutFile

MANY = 20_000
MAX_MANY_S = 5.0
"""Reading the heads of 20,000 rollouts takes a fifth of a second; the limit leaves room for a busy machine."""


def test_evaluations_are_found_from_a_run_from_their_own_directory_and_from_any_between(tmp_path: Path):
    late = write_evaluation(tmp_path, step=10, rewards=[[1.0]])
    first = write_evaluation(tmp_path, step=2, rewards=[[0.0]])
    validation = write_evaluation(tmp_path, step=2, env="val/owner/name", rewards=[[0.0]])
    found = find_evaluations(tmp_path)
    assert [(evaluation.policy, evaluation.name) for evaluation in found] == [
        ("step 2", "spelling"),
        ("step 2", "val/owner/name"),
        ("step 10", "spelling"),
    ]
    assert [evaluation.directory for evaluation in found] == [first, validation, late]
    for directory in (late, late.parent):
        assert [(evaluation.policy, evaluation.name) for evaluation in find_evaluations(directory)] == [("step 10", "spelling")]


def test_the_base_model_an_unfinished_evaluation_and_a_damaged_summary_are_told_apart(tmp_path: Path):
    write_evaluation(tmp_path, step=0, rewards=[[1.0, 0.0]])
    write_evaluation(tmp_path, step=1, rewards=[[1.0]], is_complete=False)
    (write_evaluation(tmp_path, step=2, rewards=[[1.0]]) / "summary.json").write_text("{", encoding="utf-8")
    base, unfinished, damaged = find_evaluations(tmp_path)
    assert (base.policy, base.summary.avg) == ("base", 0.5)
    assert (unfinished.policy, unfinished.summary, unfinished.fault) == ("step 1", None, "")
    assert damaged.summary is None
    assert "summary.json cannot be read" in damaged.fault


def test_results_of_vf_eval_are_named_by_their_model(tmp_path: Path):
    [found] = find_evaluations(write_vf_results(tmp_path / "spelling--model" / "1234"))
    assert (found.name, found.policy, found.summary.avg) == ("spelling", "maker/model", 0.5)


@pytest.mark.parametrize("name", ["", "missing"])
def test_a_directory_without_evaluations_is_refused(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match="give a run's output_dir" if name else "holds no evaluation"):
        find_evaluations(tmp_path / name)


def test_a_link_to_another_directory_is_not_followed(tmp_path: Path):
    write_evaluation(tmp_path / "other", step=1, rewards=[[1.0]])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "link").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="holds no evaluation"):
        find_evaluations(tmp_path / "mine")


def test_damaged_lines_are_counted_and_an_unfinished_one_is_not(tmp_path: Path):
    path = write_evaluation(tmp_path, step=1, rewards=[[1.0], [0.5]]) / "results.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'{"reward": "high"}\n' + second + second[:30])
    rollouts = RolloutFile(path)
    assert [head.reward for head in rollouts.heads] == [1.0, 0.5]
    assert rollouts.num_damaged == 1
    assert "question1.0" in str(rollouts.row(rollouts.heads[1]).completion)
    rollouts.close()
    assert rollouts.row(rollouts.heads[0]) is None


def test_rollouts_of_two_policies_are_paired_by_example_and_attempt(tmp_path: Path):
    before = write_evaluation(tmp_path, step=0, rewards=[[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]) / "results.jsonl"
    after = write_evaluation(tmp_path, step=1, rewards=[[1.0, 0.5], [0.0, 1.0]]) / "results.jsonl"
    with closing(RolloutFile(before)) as first, closing(RolloutFile(after)) as second:
        pairs = pair_rollouts([first, second])
    assert [(one.example_id, one.attempt) for one, _ in pairs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all((one.example_id, one.attempt) == (other.example_id, other.attempt) for one, other in pairs)
    gains = [other.reward - one.reward for one, other in sorted(pairs, key=PAIR_SORTS["greatest gain first"])]
    assert gains == [1.0, 1.0, 0.0, -0.5]
    assert len(list(filter(PAIR_FILTERS["second worse"], pairs))) == 1


def test_a_text_is_found_in_messages_and_in_tool_calls_whatever_its_case(tmp_path: Path):
    path = write_evaluation(tmp_path, step=1, rewards=[[1.0]]) / "results.jsonl"
    call = b'"tool_calls":[{"name":"look_up","arguments":"{}"}],"role":"assistant"'
    path.write_bytes(path.read_bytes().replace(b'"role":"assistant"', call))
    with closing(RolloutFile(path)) as rollouts:
        [head] = rollouts.heads
        found = [text for text in ("SPELL", "LOOK_UP", "policy 1", "policy 2") if rollouts.contains(head, text)]
    assert found == ["SPELL", "LOOK_UP", "policy 1"]


def test_only_the_heads_of_many_rollouts_are_kept(tmp_path: Path):
    path = write_evaluation(tmp_path, step=1, rewards=[[1.0]]) / "results.jsonl"
    path.write_bytes(path.read_bytes().replace(b"second line", b"x" * 500) * MANY)
    started = time.monotonic()
    rollouts = RolloutFile(path)
    assert time.monotonic() - started < MAX_MANY_S
    assert len(rollouts.heads) == MANY
    assert "question0.0" in str(rollouts.row(rollouts.heads[-1]).completion)
    rollouts.close()
