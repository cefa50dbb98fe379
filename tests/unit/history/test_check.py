"""Run `trivet check` on directories: it compares events with files. Exit codes and messages are checked too."""

import shutil

import msgspec
import pytest

from support.groups import make_group
from support.histories import write_events
from support.made_run import STEPS, make_run, write_checkpoint, write_weights
from trivet.checkpoints.commit import ORCHESTRATOR, TRAINER, begin_part, commit, finish_part
from trivet.cli.main import main
from trivet.config.layout import COMMITTED, MANIFEST, RunLayout
from trivet.history.check import check_run
from trivet.orchestrator.checkpoint import write_rollouts
from trivet.weights.publish import DeltaPublisher, publish
from trivet.wire.events import AnyEvent, BatchFormed, Commit, Publish, Start, Stop, Train
from trivet.wire.versions import Step


@pytest.fixture
def layout(tmp_path):
    return RunLayout(tmp_path / "run")


def check(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["check", str(layout.root)])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_kept_its_promises_is_proven(layout, capsys, seed):
    make_run(layout, seed=seed)
    code, out = check(layout, capsys)
    assert (code, "(invariants 1 to 4)" in out) == (0, True), out
    assert f"done at step {STEPS}" in out


def test_a_directory_without_a_run_is_no_run(tmp_path, capsys):
    assert main(["check", str(tmp_path)]) == 2
    assert "holds no events.jsonl" in capsys.readouterr().err


def test_the_event_that_broke_an_invariant_is_shown_with_its_line(layout, capsys):
    events = make_run(layout)
    place = max(place for place, event in enumerate(events) if isinstance(event, Train))
    events.insert(place, events[place])
    write_events(layout.events, events)
    code, out = check(layout, capsys)
    assert code == 1
    assert f"events.jsonl:{place + 2}: invariant 1 (exactly once): step {STEPS} is trained" in out
    assert f"| {msgspec.json.encode(events[place]).decode()[:-1]}" in out


def test_a_program_reads_what_does_not_hold(layout, capsys):
    events = make_run(layout)
    place = max(place for place, event in enumerate(events) if isinstance(event, Train))
    events.insert(place, events[place])
    write_events(layout.events, events)
    assert main(["check", str(layout.root), "--json"]) == 1
    found = msgspec.json.decode(capsys.readouterr().out)
    assert {"invariant": "exactly_once", "line": place + 2} in [
        {name: breach[name] for name in ("invariant", "line")} for breach in found["breaches"]
    ]
    groups = found["groups"]
    ends = groups["batched"] + sum(groups["filtered"].values()) + sum(groups["dropped"].values())
    assert groups["dispatched"] == ends + groups["ready"] + groups["in_flight"]


def broken_file(layout: RunLayout, what: str) -> None:
    checkpoint = layout.checkpoint_step(STEPS)
    match what:
        case "an altered checkpoint":
            (checkpoint / TRAINER / "state.msgpack").write_bytes(b"shardz")
        case "a checkpoint that is gone":
            shutil.rmtree(checkpoint)
        case "a commit of nothing":
            shutil.copytree(checkpoint, layout.checkpoint_step(STEPS + 1))
        case "altered weights":
            (layout.weights_step(STEPS) / "model.safetensors").write_bytes(b"weights of X")
        case "a manifest that is no JSON":
            (layout.weights_step(STEPS) / MANIFEST).write_text("{")
        case "weights of another run":
            shutil.rmtree(layout.weights_step(STEPS))
            publish(layout, version=STEPS, run_id="other", write=lambda path: write_weights(path, b"other"))
        case "rollouts of other groups":
            write_rollouts(layout, Step(STEPS), [make_group(10_000)])
        case _:
            raise AssertionError(what)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("an altered checkpoint", "invariant 3 (one commit): checkpoint 9 cannot be resumed from"),
        ("a checkpoint that is gone", "invariant 3 (one commit): step 9 is the last commit of the history, and"),
        ("a commit of nothing", "is committed; the history has no commit of step 10"),
        ("altered weights", "invariant 4 (readers are safe)"),
        ("a manifest that is no JSON", "cannot be read"),
        ("weights of another run", "invariant 2 (versions tell the truth)"),
        ("rollouts of other groups", "invariant 1 (exactly once)"),
    ],
)
def test_a_file_that_contradicts_the_history_is_named(layout, capsys, what, said):
    make_run(layout)
    broken_file(layout, what)
    code, out = check(layout, capsys)
    assert code == 1
    assert said in out


def test_a_checkpoint_that_forgot_a_group_is_named(layout, capsys):
    events = make_run(layout)
    shutil.rmtree(layout.checkpoint_step(STEPS))
    formed = max(place for place, event in enumerate(events) if isinstance(event, BatchFormed))
    write_checkpoint(layout, [*events[:formed], events[formed]], STEPS)
    path = layout.checkpoint_step(STEPS)
    part = msgspec.msgpack.decode((path / ORCHESTRATOR / "state.msgpack").read_bytes())
    part["sampler"]["next_group_id"] += 1
    for name, content in ((ORCHESTRATOR, msgspec.msgpack.encode(part)), (TRAINER, b"shards")):
        (begin_part(layout, Step(STEPS), name) / "state.msgpack").write_bytes(content)
        finish_part(layout, Step(STEPS), name)
    (path / COMMITTED).unlink()
    commit(layout, Step(STEPS))
    code, out = check(layout, capsys)
    assert code == 1
    assert "the group after batch 9 is" in out


def test_a_run_that_was_killed_between_a_commit_and_its_event_is_proven(layout):
    events = make_run(layout)
    del events[max(place for place, event in enumerate(events) if isinstance(event, Commit))]
    write_events(layout.events, [event for event in events if not (isinstance(event, Stop) and event.role == "trainer")])
    layout.status.unlink()
    report = check_run(layout)
    assert not report.ledger.breaches, report.ledger.breaches
    assert report.last_stop is None


def test_a_line_that_is_cut_short_by_a_full_disk_does_not_count(layout):
    events = make_run(layout)
    lines = layout.events.read_bytes().splitlines(keepends=True)
    lines[20] = lines[19][:30] + lines[20]
    layout.events.write_bytes(b"".join(lines) + b'{"event":"train","st')
    report = check_run(layout)
    assert not report.ledger.breaches
    assert report.num_events == len(events)


def test_a_line_that_is_no_event_is_an_error_that_names_it(layout, capsys):
    make_run(layout)
    with layout.events.open("ab") as file:
        file.write(b'{"event":"party \x1b[2J"}\n')
    assert main(["check", str(layout.root)]) == 1
    said = capsys.readouterr().err
    assert "is no event of this version" in said
    assert "\x1b" not in said


@pytest.mark.parametrize("trained", [0, 2], ids=["its publications tell its step", "it tells every step"])
def test_supervised_fine_tuning_is_proven_too(layout, trained):
    manifest = publish(layout, version=2, run_id="run", write=lambda path: write_weights(path, b"sft"))
    events: list[AnyEvent] = [
        Start(role="sft", run_id="run", from_step=Step(0)),
        *(Train(role="sft", step=Step(step), group_ids=[]) for step in range(1, trained + 1)),
        Publish(role="sft", version=manifest.version, digest=manifest.digest),
        Stop(role="sft", step=Step(2), reason="done"),
    ]
    write_events(layout.events, events)
    report = check_run(layout)
    assert not report.ledger.breaches
    assert report.last_step == 2


def test_a_manifest_or_a_delta_that_was_altered_is_found(layout):
    deltas = DeltaPublisher(layout, anchor_interval=50)
    manifests = [
        publish(
            layout,
            version=v,
            run_id="run",
            write=lambda path, v=v: write_weights(path, bytes(99_999) + b"%d" % v),
            deltas=deltas,
        )
        for v in (1, 2)
    ]
    manifest = manifests[-1]
    write_events(
        layout.events,
        [
            Start(role="sft", run_id="run", from_step=Step(0)),
            *(
                event
                for each in manifests
                for event in (
                    Train(role="sft", step=Step(each.version), group_ids=[]),
                    Publish(role="sft", version=each.version, digest=each.digest, manifest_sha256=each.sha256),
                )
            ),
            Stop(role="sft", step=Step(manifest.version), reason="done"),
        ],
    )
    assert not check_run(layout).ledger.breaches
    path = layout.weights_step(manifest.version) / MANIFEST
    content = path.read_bytes()
    for old, new in ((b'"deltas"', b'"deltaz"'), (b'"probe"', b'"prob"')):
        assert old in content
        path.write_bytes(content.replace(old, new))
        assert "manifest.json is not the one that was published" in str(check_run(layout).ledger.breaches)
    path.write_bytes(content)
    delta = layout.weights_step(manifest.version) / manifest.deltas[-1].name
    delta.write_bytes(delta.read_bytes()[::-1])
    assert "does not match its recorded digest" in str(check_run(layout).ledger.breaches)
