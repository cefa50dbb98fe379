import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig, ShownSamplesConfig
from trivet.config.schema.shared import RunIdentity, SteppingRoleConfig, WandbConfig
from trivet.errors import CheckpointError
from trivet.telemetry.console import conversation_text
from trivet.telemetry.events import EventWriter, chain_value, num_complete_bytes, read_events, take_apart
from trivet.telemetry.telemetry import Telemetry
from trivet.wire.events import (
    AnyEvent,
    BatchFormed,
    Commit,
    Dispatch,
    Drop,
    Filter,
    Finish,
    Load,
    Publish,
    Retire,
    Start,
    Stop,
    Train,
)
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import Step

RUN = RunIdentity(id="run", attempt=2)


@pytest.fixture
def layout(tmp_path):
    return RunLayout(tmp_path)


def test_a_step_goes_to_the_metrics_file_and_the_console(layout, caplog):
    telemetry = Telemetry("trainer", SteppingRoleConfig(output_dir=layout.root, run=RUN))
    with caplog.at_level(logging.INFO):
        telemetry.write_step(3, {"time/step": 1.0, "loss/mean": 0.5})
    telemetry.close()
    telemetry.close()
    line = json.loads((layout.metrics / "trainer.jsonl").read_text())
    assert (line["step"], line["loss/mean"]) == (3, 0.5)
    assert [record.getMessage() for record in caplog.records] == ["Step 3 | Time: 1.00s | Loss: 0.5000"]
    assert caplog.records[0].levelno == 25


def test_events_of_two_roles_share_a_file(layout):
    roles = [Telemetry(role, SteppingRoleConfig(output_dir=layout.root, run=RUN)) for role in ("trainer", "orchestrator")]
    roles[0].write_event(Start(run_id="run", from_step=0))
    roles[1].write_event(Dispatch(group_id=1, env="e", example_id=4, version=0))
    roles[0].write_event(Commit(step=6, digest="d"))
    for telemetry in roles:
        telemetry.sync_events()
        telemetry.close()
    found = [(event.role, type(event), event.attempt) for event in read_events(layout.events)]
    assert found == [("trainer", Start, 2), ("orchestrator", Dispatch, 2), ("trainer", Commit, 2)]


EVENTS: Sequence[AnyEvent] = [
    Start(run_id="r", from_step=0),
    Dispatch(group_id=1, env="e", example_id=0, version=0),
    Finish(group_id=1, reward_mean=0.5, oldest_version=0, newest_version=1, completion_tokens=3.0),
    Filter(group_id=1, reason="zero_signal"),
    Drop(group_id=1, reason="stale"),
    BatchFormed(step=1, group_ids=[1, 2], oldest_version=0, newest_version=0),
    Train(step=1, group_ids=[1, 2]),
    Publish(version=1, digest="d"),
    Load(version=1, digest="d", server="s"),
    Retire(version=1),
    Commit(step=1, digest="d"),
    Stop(step=1, reason="done"),
]


def test_every_event_reads_back_as_it_was_written(layout):
    writer = EventWriter(layout.events, role="trainer", attempt=1, clock=lambda: 7.0)
    for event in EVENTS:
        writer.write(event)
    writer.close()
    assert list(read_events(layout.events)) == EVENTS
    assert {event.time for event in EVENTS} == {7.0}
    assert json.loads(layout.events.read_text().splitlines()[5])["event"] == "batch"


def links(path, role):
    """Verify the lines of `role` in the file, and return their number."""
    last, place, count = b"", 0, 0
    for line in path.read_bytes().splitlines(keepends=True):
        if json.loads(line)["role"] == role:
            parts = take_apart(line)
            assert parts.chain == chain_value(parts.content, last)
            assert parts.offset <= place
            last, count = parts.chain, count + 1
        place += len(line)
    return count


def test_the_lines_of_a_role_are_one_chain_over_attempts_and_threads(layout):
    for attempt in (1, 2):
        writers = {role: EventWriter(layout.events, role=role, attempt=attempt) for role in ("trainer", "orchestrator")}
        for event in EVENTS:
            writers["trainer"].write(event)
            writers["orchestrator"].write(event)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda step, writer=writers["trainer"]: writer.write(Commit(step=step, digest="d")), range(100)))
        for writer in writers.values():
            writer.close()
    assert links(layout.events, "trainer") == 2 * (len(EVENTS) + 100)
    assert links(layout.events, "orchestrator") == 2 * len(EVENTS)


def test_a_line_that_a_full_disk_cut_short_does_not_break_the_chain(layout):
    writer = EventWriter(layout.events, role="trainer", attempt=1)
    writer.write(Commit(step=1, digest="d"))
    with layout.events.open("ab") as file:
        file.write(b'{"event":"commit","st')
    assert num_complete_bytes(layout.events) == layout.events.stat().st_size - 21
    assert [event.step for event in read_events(layout.events)] == [1], "a last event cut short is left out"
    again = EventWriter(layout.events, role="trainer", attempt=2)
    again.write(Commit(step=2, digest="d"))
    last = take_apart(layout.events.read_bytes().splitlines(keepends=True)[-1])
    assert last.start == 21
    assert last.chain == chain_value(last.content, take_apart(layout.events.read_bytes().splitlines(keepends=True)[0]).chain)


def test_a_rollout_is_shown_in_one_line_per_part(layout, caplog):
    prompt = [{"role": "system", "content": "Reverse."}, {"role": "user", "content": "hello\nyou"}]
    completion = [{"role": "assistant", "content": "x" * 30}]
    rollout = Rollout(index=0, reward=1.0, prompt=prompt, completion=completion)
    telemetry = Telemetry(
        "orchestrator",
        OrchestratorConfig(output_dir=layout.root, run=RUN, shown_samples=ShownSamplesConfig(interval=5, max_chars=45)),
    )
    with caplog.at_level(logging.INFO):
        telemetry.show_rollouts(4, [rollout])
        telemetry.show_rollouts(5, [rollout, rollout])
    telemetry.close()
    assert [record.getMessage() for record in caplog.records] == [
        "=== Step 5 Sample ===",
        "Prompt: [system] Reverse. [user] hello\\nyou",
        f"Completion: {'x' * 30}",
        "Reward: 1.0",
    ]


def test_a_long_conversation_is_cut_and_tool_calls_are_named():
    call = {"function": {"name": "search", "arguments": '{"q": "x"}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert conversation_text(messages, max_chars=100) == 'search({"q": "x"})'
    assert conversation_text([{"role": "user", "content": "abcdef"}], max_chars=4) == "abcd… (6 characters)"


def test_wandb_offline_gets_numbers_a_table_of_rollouts_and_their_distributions(layout):
    wandb = pytest.importorskip("wandb")
    telemetry = Telemetry("orchestrator", SteppingRoleConfig(output_dir=layout.root, run=RUN, wandb=WandbConfig(offline=True)))
    telemetry.write_step(10, {"reward/mean": 0.25, "entropy/mean": float("nan")})
    telemetry.show_rollouts(10, [Rollout(index=0, reward=0.5, completion=[{"role": "assistant", "content": "olleh"}])])
    telemetry.close()
    (table,) = layout.root.glob("wandb/offline-run-*/files/media/table/**/*.json")
    assert "olleh" in table.read_text()
    (record,) = layout.root.glob("wandb/offline-run-*/run-run.wandb")
    assert b"orchestrator/reward/mean" in record.read_bytes()
    assert b"orchestrator/distributions/reward" in record.read_bytes()
    assert b"entropy" not in record.read_bytes()
    assert wandb.run is None


def test_what_may_not_be_written_any_more_leaves_the_files_as_they_are(layout):
    def check() -> None:
        if len(allowed) == 0:
            raise CheckpointError("attempt 3 has begun")
        allowed.pop()

    allowed = [True, True]  # to open the metrics, and to write one event
    telemetry = Telemetry("trainer", SteppingRoleConfig(output_dir=layout.root, run=RUN), check=check)
    telemetry.write_event(Start(run_id="run", from_step=Step(0)))
    with pytest.raises(CheckpointError, match="attempt 3 has begun"):
        telemetry.write_event(Stop(step=Step(0), reason="interrupted"))
    with pytest.raises(CheckpointError, match="attempt 3 has begun"):
        telemetry.write_step(1, {"loss/mean": 0.25})
    telemetry.close()
    assert [type(event) for event in read_events(layout.events)] == [Start]
    assert (layout.metrics / "trainer.jsonl").read_bytes() == b""
