"""A recorded real run, with faults at eight points and seven attempts, is proven. Where a line matters, no repetition, omission
or change of it passes."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trivet.config.layout import RunLayout
from trivet.history.check import check_run

RECORDED = Path(__file__).parents[2] / "data" / "faulty_run_events.jsonl"
LINES = RECORDED.read_text().splitlines()
NEVER_TWICE = ("finish", "filter", "drop", "batch", "train", "commit", "retire")


def breaches(layout: RunLayout, lines: list[str]) -> list[int | None]:
    layout.events.parent.mkdir(parents=True, exist_ok=True)
    layout.events.write_text("\n".join(lines) + "\n")
    return [breach.line for breach in check_run(layout).breaches if breach.line is not None]


def of_kind(*kinds: str) -> Iterator[int]:
    for place, line in enumerate(LINES):
        if json.loads(line)["event"] in kinds:
            yield place


def with_change(place: int, change: Callable[[dict[str, Any]], Any]) -> list[str]:
    values = json.loads(LINES[place])
    change(values)
    return [*LINES[:place], json.dumps(values), *LINES[place + 1 :]]


@pytest.fixture
def layout(tmp_path):
    return RunLayout(tmp_path / "run")


def test_it_is_proven(layout):
    assert breaches(layout, LINES) == []


def test_what_may_not_happen_twice_is_named_wherever_it_does(layout):
    places = list(of_kind(*NEVER_TWICE))
    assert len(places) > 100
    for place in places:
        lines = [*LINES[: place + 1], LINES[place], *LINES[place + 1 :]]
        assert breaches(layout, lines)[:1] == [place + 2], LINES[place]


def test_a_batch_that_was_trained_or_a_step_that_was_published_cannot_be_left_out(layout):
    for place in of_kind("batch", "train"):
        values = json.loads(LINES[place])
        follows = {"batch": ("train", "step"), "train": ("publish", "version")}[values["event"]]
        after = [event for event in map(json.loads, LINES[place:]) if event["attempt"] == values["attempt"]]
        if any(event["event"] == follows[0] and event[follows[1]] == values["step"] for event in after):
            assert breaches(layout, [*LINES[:place], *LINES[place + 1 :]]), LINES[place]


def test_a_load_of_other_bytes_is_named_wherever_it_happens(layout):
    for place in of_kind("load", "serverup"):
        lines = with_change(place, lambda values: values.update(digest="0" * 64))
        assert breaches(layout, lines), LINES[place]


def test_a_token_of_the_wrong_policy_is_named_wherever_it_is(layout):
    for place in of_kind("finish"):
        lines = with_change(place, lambda values: values.update(newest_version=values["newest_version"] + 100))
        assert breaches(layout, lines)[:1] == [place + 1]
    for place in of_kind("batch"):
        lines = with_change(place, lambda values: values.update(newest_version=values["step"]))
        assert breaches(layout, lines)[:1] == [place + 1]


def test_another_group_in_a_step_is_named_wherever_it_is(layout):
    for place in of_kind("train", "batch"):
        lines = with_change(place, lambda values: values["group_ids"].__setitem__(0, 9999))
        assert breaches(layout, lines)[:1] == [place + 1]
