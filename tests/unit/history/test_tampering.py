"""Damage a run's files as an accident or a careless edit might. Each damage is found, and none ends in a traceback."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.histories import write_events
from support.made_run import STEPS, make_run, write_checkpoint
from support.mutations import KINDS, judge_many, shares
from trivet.cli.main import main
from trivet.config.layout import COMMITTED, MANIFEST, ROLLOUTS_FILE, STABLE, RunLayout
from trivet.history.run_history import TRAINER
from trivet.telemetry.events import seal
from trivet.wire.events import AnyEvent, Restart, Start

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    layout = RunLayout(tmp_path_factory.mktemp("made") / "run")
    make_run(layout, seed=8)  # of one attempt
    return layout


@pytest.fixture
def layout(made: RunLayout, tmp_path: Path) -> RunLayout:
    shutil.copytree(made.root, tmp_path / "run")
    return RunLayout(tmp_path / "run")


def check(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `trivet check` prints for a run that is broken."""
    code = main(["check", str(layout.root)])
    captured = capsys.readouterr()
    assert code == 1, captured.out
    return captured.out + captured.err


def reseal(layout: RunLayout, change: Callable[[Lines], object]) -> None:
    """Change the history, and compute its chain anew."""
    lines = [json.loads(line) for line in layout.events.read_text().splitlines()]
    change(lines)
    write_events(layout.events, msgspec.convert(lines, list[AnyEvent]))
    layout.status.unlink(missing_ok=True)


def last(lines: Lines, **wanted: object) -> int:
    return max(place for place, line in enumerate(lines) if all(line.get(name) == value for name, value in wanted.items()))


def first(lines: Lines, **wanted: object) -> int:
    return min(place for place, line in enumerate(lines) if all(line.get(name) == value for name, value in wanted.items()))


def test_a_history_without_chain_values_is_refused(layout, capsys):
    lines = [json.loads(line) for line in layout.events.read_text().splitlines()]
    events = [{name: value for name, value in line.items() if name not in ("offset", "chain")} for line in lines]
    layout.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert "or another version of trivet wrote it" in check(layout, capsys)


def drop(**wanted: object) -> Callable[[Lines], object]:
    return lambda lines: lines.pop(last(lines, **wanted))


def drop_first(**wanted: object) -> Callable[[Lines], object]:
    return lambda lines: lines.pop(first(lines, **wanted))


def repeat(**wanted: object) -> Callable[[Lines], object]:
    return lambda lines: lines.insert(last(lines, **wanted) + 1, dict(lines[last(lines, **wanted)]))


def change(name: str, value: object, **wanted: object) -> Callable[[Lines], object]:
    return lambda lines: lines[last(lines, **wanted)].update({name: value})


def shuffle(lines: Lines) -> None:
    random.Random(1).shuffle(lines)


def first_ten(lines: Lines) -> None:
    del lines[:10]


def another_run_everywhere(lines: Lines) -> None:
    for line in lines:
        if line["event"] == "start":
            line["run_id"] = "another"


def commit_behind_stop(lines: Lines) -> None:
    lines.append(lines.pop(last(lines, event="commit")))


def drop_behind_stop(lines: Lines) -> None:
    stop = last(lines, event="stop", role="orchestrator")
    lines.insert(stop, {**lines[stop], "event": "drop", "group_id": 10_000, "reason": "stale"})
    lines[stop], lines[stop + 1] = lines[stop + 1], lines[stop]


def attempts_that_shrink(lines: Lines) -> None:
    for line in lines[last(lines, event="start", role="trainer") + 1 :]:
        if line["role"] == "trainer":
            line["attempt"] = 0


def edit_dispatches(edit: Callable[[dict[str, Any]], object]) -> Callable[[Lines], object]:
    """Return a function that edits the dispatches of a group of the last batch."""

    def tamper(lines: Lines) -> None:
        group_id = lines[last(lines, event="batch")]["group_ids"][0]
        for line in lines:
            if line["event"] == "dispatch" and line["group_id"] == group_id:
                edit(line)

    return tamper


def rewards_of_a_trained_group(lines: Lines) -> None:
    group_id = lines[last(lines, event="batch")]["group_ids"][0]
    lines[last(lines, event="finish", group_id=group_id)]["reward_mean"] += 0.25


def swapped_examples(lines: Lines) -> None:
    first_id, second_id = lines[last(lines, event="batch")]["group_ids"][:2]
    examples = {
        first_id: lines[last(lines, event="dispatch", group_id=second_id)]["example_id"],
        second_id: lines[last(lines, event="dispatch", group_id=first_id)]["example_id"],
    }
    assert examples[first_id] != examples[second_id]
    for line in lines:
        if line["event"] == "dispatch":
            line["example_id"] = examples.get(line["group_id"], line["example_id"])


def batch_relabelled(lines: Lines) -> None:
    batch = lines[last(lines, event="batch")]
    for group_id in batch["group_ids"]:
        finish = lines[last(lines, event="finish", group_id=group_id)]
        finish["newest_version"] = max(finish["newest_version"], batch["step"] - 1)
        finish["oldest_version"] = finish["newest_version"]
    batch["oldest_version"] = batch["newest_version"] = batch["step"] - 1


NEW_CHAIN: list[tuple[str, Callable[[Lines], object], str]] = [
    ("a retire is missing", drop(event="retire"), "was published and not removed"),
    ("the orchestrator's start is missing", drop(event="start", role="orchestrator"), ""),
    ("the orchestrator's first start is missing", drop_first(event="start", role="orchestrator"), ""),
    ("the trainer's first start is missing", drop_first(event="start", role="trainer"), ""),
    ("the first ten lines are missing", first_ten, "writes before its start"),
    ("all lines are shuffled", shuffle, ""),
    ("a dispatch is there twice", repeat(event="dispatch"), "repeats the line before"),
    ("a publish is there twice", repeat(event="publish"), "published twice"),
    ("a load is there twice", repeat(event="load"), "repeats the line before"),
    ("a serverup is there twice", repeat(event="serverup"), "is up, and comes up again"),
    ("a serverdown is missing", drop_first(event="serverdown"), "is up, and comes up again"),
    ("a stop is there twice", repeat(event="stop", role="trainer"), "after its stop"),
    ("a start is there twice", repeat(event="start", role="trainer"), "starts as attempt"),
    ("another example", edit_dispatches(lambda line: line.update(example_id=line["example_id"] + 1)), "it was dispatched as"),
    ("the examples of two groups are swapped", swapped_examples, "it was dispatched as"),
    ("another environment", edit_dispatches(lambda line: line.update(env="other")), "it was dispatched as"),
    ("other rewards", rewards_of_a_trained_group, "has the mean reward"),
    ("a batch relabelled consistently", batch_relabelled, "it finished with"),
    ("a dispatch at version 0", change("version", 0, event="dispatch"), "at an older policy than the one before"),
    ("a commit behind the stop", commit_behind_stop, "writes after its stop"),
    ("a drop behind the stop", drop_behind_stop, "writes after its stop"),
    ("another run id in every start", another_run_everywhere, "is of run 'run', the history of 'another'"),
    ("attempts that shrink", attempts_that_shrink, "started as attempt 1 and writes as 0"),
]


@pytest.mark.parametrize(("name", "tamper", "said"), NEW_CHAIN, ids=[name for name, _, _ in NEW_CHAIN])
def test_tampering_with_events_is_found_although_the_chain_was_computed_anew(layout, capsys, name, tamper, said):
    reseal(layout, tamper)
    out = check(layout, capsys)
    assert "Traceback" not in out
    assert said in out


ONLY_BY_THE_CHAIN: list[tuple[str, Callable[[Lines], object]]] = [
    ("the last try of a group is missing", drop(event="dispatch")),
    ("a stop between attempts is missing", drop(event="stop")),
    ("a commit is missing", drop_first(event="commit")),
    ("two finishes are swapped", lambda lines: _swap_finishes(lines)),
    ("another reward of a group that was filtered", lambda lines: _other_reward(lines)),
    ("the digest of the start model everywhere", lambda lines: _other_start_model(lines)),
    ("a clock that goes back", lambda lines: lines[len(lines) // 2].update(time=0.5)),
    ("a reason", change("reason", "another", event="drop")),
]


def _swap_finishes(lines: Lines) -> None:
    places = [place for place, line in enumerate(lines) if line["event"] == "finish"][:2]
    lines[places[0]], lines[places[1]] = lines[places[1]], lines[places[0]]


def _other_reward(lines: Lines) -> None:
    group_id = lines[last(lines, event="filter")]["group_id"]
    lines[last(lines, event="finish", group_id=group_id)]["reward_mean"] += 1.0


def _other_start_model(lines: Lines) -> None:
    for line in lines:
        if line.get("version") == 0 and "digest" in line:
            line["digest"] = "another"


@pytest.mark.parametrize(("name", "tamper"), ONLY_BY_THE_CHAIN, ids=[name for name, _ in ONLY_BY_THE_CHAIN])
def test_tampering_that_leaves_a_possible_history_breaks_the_chain(layout, capsys, name, tamper):
    lines = [json.loads(line) for line in layout.events.read_text().splitlines()]
    before = json.dumps(lines)
    tamper(lines)
    assert json.dumps(lines) != before
    layout.events.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    out = check(layout, capsys)
    assert "the chain of the" in out or "its end is gone" in out


def restarted(layout: RunLayout, before: bytes, after: bytes) -> None:
    """Add an event of the launcher, whose only line it is, with a change in its end."""
    *lines, last_line = layout.events.read_bytes().splitlines(keepends=True)
    event = Restart(roles=["inference"], cause="inference killed", from_step=None, role="launcher", attempt=1)
    event.time = json.loads(last_line)["time"]
    line, _ = seal(msgspec.json.encode(event), offset=sum(map(len, lines)))
    layout.events.write_bytes(b"".join([*lines, line.replace(before, after), last_line]))


@pytest.mark.parametrize("damage", [(b"offset", b"pffset"), (b"chain", b"dhain"), (b"\n", b"\v")])
def test_the_only_line_of_a_role_cannot_lose_its_end(layout, capsys, damage):
    content = layout.events.read_bytes()
    restarted(layout, b"", b"")
    assert main(["check", str(layout.root)]) == 0
    layout.events.write_bytes(content)
    restarted(layout, *damage)
    assert re.search("has no chain value|the line break between them", check(layout, capsys))


def rewrite_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_row(layout: RunLayout, **values: object) -> None:
    path = layout.rollouts_step(STEPS) / ROLLOUTS_FILE
    lines = path.read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | values)
    path.write_text("\n".join(lines) + "\n")


def rows(layout: RunLayout, edit: Callable[[list[bytes]], list[bytes]]) -> None:
    path = layout.rollouts_step(STEPS) / ROLLOUTS_FILE
    path.write_bytes(b"".join(edit(path.read_bytes().splitlines(keepends=True))))


def copied_commit(layout: RunLayout) -> None:
    other = layout.checkpoint_step(STEPS + 5)
    shutil.copytree(layout.checkpoint_step(STEPS), other)


def without_last_line(run: RunLayout) -> None:
    run.events.write_bytes(b"".join(run.events.read_bytes().splitlines(keepends=True)[:-1]))


FILES: list[tuple[str, Callable[[RunLayout], object], str]] = [
    ("run.json is of another run", lambda run: rewrite_json(run.run_file, id="another"), "run.json is of run 'another'"),
    ("run.json is junk", lambda run: run.run_file.write_bytes(b"\xff{"), "run.json cannot be read"),
    (
        "a manifest of another version",
        lambda run: rewrite_json(run.weights_step(STEPS) / MANIFEST, version=STEPS - 1),
        "is of version 8: it was copied",
    ),
    (
        "a manifest of another run",
        lambda run: rewrite_json(run.weights_step(STEPS) / MANIFEST, run_id="another"),
        "is of run 'another'",
    ),
    ("STABLE is gone", lambda run: (run.weights_step(STEPS) / STABLE).unlink(), "was published and not removed"),
    ("a policy is gone", lambda run: shutil.rmtree(run.weights_step(STEPS)), "was published and not removed"),
    ("all of weights/ is gone", lambda run: shutil.rmtree(run.weights), "was published and not removed"),
    ("a file beside the weights", lambda run: (run.weights_step(STEPS) / "x").write_bytes(b"x"), "which nobody published"),
    ("COMMITTED in another step", copied_commit, "is the record of step 9, not of step 14"),
    (
        "COMMITTED without parts",
        lambda run: rewrite_json(run.checkpoint_step(STEPS) / COMMITTED, parts={}),
        "records the parts []",
    ),
    (
        "COMMITTED of another run",
        lambda run: rewrite_json(run.checkpoint_step(STEPS) / COMMITTED, run_id="another"),
        "was committed by run 'another'",
    ),
    (
        "COMMITTED at another time",
        lambda run: rewrite_json(run.checkpoint_step(STEPS) / COMMITTED, time=1.0),
        "is not the record that the history has of this commit",
    ),
    (
        "a file added to a checkpoint",
        lambda run: (run.checkpoint_step(STEPS) / TRAINER / "more").write_bytes(b"x"),
        "which nobody committed",
    ),
    ("seven of eight rows", lambda run: rows(run, lambda lines: lines[:-1]), "has the rollouts [0] of 2"),
    ("a row twice", lambda run: rows(run, lambda lines: [lines[0], *lines]), "has the rollouts [0, 0, 1] of 2"),
    ("another text", lambda run: change_row(run, completion=[]), "are not those that were written there"),
    ("another reward", lambda run: change_row(run, reward=9.0), "has the mean reward"),
    ("another id", lambda run: change_row(run, group_id=77), "holds other groups"),
    ("another example", lambda run: change_row(run, example_id=777), "it was dispatched as"),
    ("older versions", lambda run: change_row(run, versions=[[0, 4]]), "it finished with"),
    ("rollouts are gone", lambda run: shutil.rmtree(run.rollouts_step(STEPS)), "were written, and"),
    ("rollouts cut short", lambda run: rows(run, lambda lines: [*lines[:-1], lines[-1][:40]]), "is no rollout"),
    ("rollouts without their last end", lambda run: rows(run, lambda lines: [*lines[:-1], lines[-1][:-1]]), "is cut short"),
    ("rollouts are binary", lambda run: rows(run, lambda lines: [b"\x00\xff\x7f"]), "is no rollout"),
    (
        "junk in a configuration",
        lambda run: (run.configs / "orchestrator.toml").write_bytes(b"\xff = ["),
        "orchestrator.toml cannot be read",
    ),
    (
        "the last line is missing",
        without_last_line,
        "its end is gone",
    ),
    ("the last line is cut", lambda run: run.events.write_bytes(run.events.read_bytes()[:-9]), "the last line is torn after"),
]


@pytest.mark.parametrize(("name", "tamper", "said"), FILES, ids=[name for name, _, _ in FILES])
def test_tampering_with_files_is_found(layout, capsys, name, tamper, said):
    tamper(layout)
    out = check(layout, capsys)
    assert said in out
    assert "Traceback" not in out


def test_a_directory_in_the_place_of_the_events_is_named(layout, capsys):
    layout.events.unlink()
    layout.events.mkdir()
    assert "cannot be read: Is a directory" in check(layout, capsys)


def test_an_older_commit_whose_record_is_gone_is_found(layout, capsys):
    (layout.configs / "trainer.toml").write_text("[ckpt]\n")  # all are kept
    events = list(map(_decode, layout.events.read_bytes().splitlines()))
    write_checkpoint(layout, events, 3)
    (layout.checkpoint_step(3) / COMMITTED).unlink()
    assert "step 3 is committed in the history, and" in check(layout, capsys)


def test_a_restart_that_is_missing_is_found(tmp_path, capsys):
    """Only the position of the next line shows it: the launcher writes no line before or after."""
    layout = RunLayout(tmp_path / "run")
    events = make_run(layout, seed=7)
    place = max(place for place, event in enumerate(events) if isinstance(event, Start) and event.role == TRAINER)
    attempt = events[place].attempt
    assert attempt > 1
    restart = Restart(
        role="launcher",
        attempt=attempt,
        time=events[place].time,
        roles=[TRAINER],
        cause="killed",
        from_step=events[place].from_step,
    )
    write_events(layout.events, [*events[:place], restart, *events[place:]])
    layout.status.unlink()
    assert main(["check", str(layout.root)]) == 0, capsys.readouterr().out
    lines = layout.events.read_bytes().splitlines(keepends=True)
    layout.events.write_bytes(b"".join(lines[:place] + lines[place + 1 :]))
    assert "something before it was removed or moved" in check(layout, capsys)


def _decode(line: bytes) -> AnyEvent:
    return msgspec.json.decode(line, type=AnyEvent)


@pytest.mark.parametrize("seed", [2, 8])
def test_every_random_mutation_of_a_run_that_was_not_killed_is_found(tmp_path, seed):
    layout = RunLayout(tmp_path / "run")
    make_run(layout, seed=seed)
    outcomes = judge_many([layout.root], count=70, seed=seed)
    missed = [f"{item.where} {item.kind} {item.what}\n{item.said[-400:]}" for item in outcomes if not item.is_found]
    assert shares(outcomes).keys() == {f"{where}/{kind}" for where in ("events", "files") for kind in KINDS}
    assert not missed, "\n".join(missed)
