"""A recorded real run, with faults at eight points and six attempts, is proven. Where a line matters, no repetition, omission
or change of it passes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.histories import replay_events
from trivet.config.layout import RunLayout
from trivet.history.check import check_run
from trivet.telemetry.events import decode_event

LINES = (Path(__file__).parents[2] / "data" / "faulty_run_events.jsonl").read_text().splitlines()
NEVER_TWICE = ("finish", "filter", "drop", "batch", "train", "commit", "retire")
EVENTS = [decode_event(line.encode()) for line in LINES]
VALUES: list[dict[str, Any]] = [json.loads(line) for line in LINES]


def breaches(place: int, *lines: str) -> list[int | None]:
    """Return the lines of the breaches when `lines` take the place of one line."""
    events = [*EVENTS[:place], *(decode_event(line.encode()) for line in lines), *EVENTS[place + 1 :]]
    return [breach.line for breach in replay_events(events).ledger.breaches]


def test_it_is_proven(tmp_path):
    layout = RunLayout(tmp_path / "run")
    layout.events.parent.mkdir(parents=True)
    layout.events.write_text("\n".join(LINES) + "\n")
    assert [breach for breach in check_run(layout).ledger.breaches if breach.line is not None] == []


def test_what_may_not_happen_twice_is_named_wherever_it_does():
    places = [place for place, values in enumerate(VALUES) if values["event"] in NEVER_TWICE]
    assert len(places) > 100
    for place in places:
        assert breaches(place, LINES[place], LINES[place])[:1] == [place + 2], LINES[place]


def test_a_batch_that_was_trained_or_a_step_that_was_published_cannot_be_left_out():
    follows = {"batch": ("train", "step"), "train": ("publish", "version")}
    for place, values in enumerate(VALUES):
        if values["event"] in follows:
            event, key = follows[values["event"]]
            after = [later for later in VALUES[place:] if later["attempt"] == values["attempt"] and later["event"] == event]
            if any(later[key] == values["step"] for later in after):
                assert breaches(place), LINES[place]


@pytest.mark.parametrize(
    ("kinds", "change"),
    [
        (("finish",), lambda values: values.update(newest_version=values["newest_version"] + 100)),
        (("batch",), lambda values: values.update(newest_version=values["step"])),
        (("train", "batch"), lambda values: values["group_ids"].__setitem__(0, 9999)),
        (("load", "serverup"), lambda values: values.update(digest="0" * 64)),
    ],
    ids=["tokens of an unpublished policy", "a batch of its own policy", "another group", "other bytes"],
)
def test_a_change_is_named_wherever_it_is(kinds: tuple[str, ...], change: Callable[[dict[str, Any]], object]):
    for place, line in enumerate(LINES):
        values = json.loads(line)
        if values["event"] in kinds:
            change(values)
            found = breaches(place, json.dumps(values))
            # Other bytes of a policy may be noticed when the next server loads it.
            assert found if "load" in kinds else found[:1] == [place + 1], line
