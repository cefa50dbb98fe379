"""Makes the directory of a run that kept every promise: a random history and its files, written by the product."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

from support.groups import make_draw, make_sample
from support.histories import MAX_OFF_POLICY_STEPS, RunMaker, replay_events, write_events
from trivet.checkpoints.commit import ORCHESTRATOR, TRAINER, begin_part, commit, finish_part
from trivet.checkpoints.run_record import RunRecord
from trivet.config.layout import RunLayout
from trivet.orchestrator.buffer import BufferState
from trivet.orchestrator.checkpoint import OrchestratorPart, RunTotals, write_rollouts
from trivet.orchestrator.sampler import SamplerState
from trivet.storage.durable import write_json_atomically
from trivet.weights.manifest import Manifest
from trivet.weights.publish import publish
from trivet.wire.codec import encode
from trivet.wire.events import AnyEvent, BatchFormed, Commit, Load, Publish, Retire, RolloutsWritten, ServerUp
from trivet.wire.rollouts import Group, Rollout
from trivet.wire.status import RoleState, RoleStatus, RunState, RunStatus
from trivet.wire.versions import Step

STEPS = 9


def make_run(layout: RunLayout, *, seed: int = 5) -> list[AnyEvent]:
    events = RunMaker(Random(seed), max_steps=STEPS, max_crashes=2).run()
    published = _last_attempts(events)
    retired = {event.version for event in events if isinstance(event, Retire)}
    manifests: dict[int, Manifest] = {}
    for version in range(1, STEPS + 1):
        content = f"weights of {version}".encode()
        manifests[version] = publish(
            layout, version=version, run_id="run", write=lambda path, data=content: write_weights(path, data)
        )
        if version in retired and version not in published:
            shutil.rmtree(layout.weights_step(version))
    for event in events:
        if isinstance(event, Publish | Load | ServerUp) and event.version:
            event.digest = manifests[event.version].digest
        if isinstance(event, Publish):
            event.manifest_sha256 = manifests[event.version].sha256
    _write_all_rollouts(layout, events)
    layout.configs.mkdir()
    (layout.configs / "orchestrator.toml").write_text(
        f"max_off_policy_steps = {MAX_OFF_POLICY_STEPS}\nrollouts_per_example = 2\n"
    )
    (layout.configs / "trainer.toml").write_text("[ckpt]\nkeep_last = 1\n")
    digest = write_checkpoint(layout, events, STEPS)
    for event in events:
        if isinstance(event, Commit) and event.step == STEPS:
            event.digest = digest
    attempt = max(event.attempt for event in events)
    write_json_atomically(layout.run_file, RunRecord(id="run", attempt=attempt, started=0.0, pid=1))
    write_events(layout.events, events)
    write_status(layout, attempt=attempt)
    return events


def write_status(layout: RunLayout, *, attempt: int) -> None:
    """Write the launcher's last status of a finished run."""
    roles = [
        RoleStatus(name=name, state=RoleState.ENDED, pid=1, exit="ended with exit code 0") for name in (ORCHESTRATOR, TRAINER)
    ]
    status = RunStatus(
        run_id="run",
        attempt=attempt,
        pid=1,
        state=RunState.DONE,
        started=0.0,
        time=0.0,
        roles=roles,
        events_bytes=layout.events.stat().st_size,
    )
    write_json_atomically(layout.status, status)


def write_weights(directory: Path, data: bytes) -> None:
    (directory / "model.safetensors").write_bytes(data)


def write_checkpoint(layout: RunLayout, events: Sequence[AnyEvent], step: int) -> str:
    """Commit `step` with the groups that live when its batch is formed. Return the record's digest."""
    formed = max(place for place, event in enumerate(events) if isinstance(event, BatchFormed) and event.step == step)
    pending = replay_events(events[: formed + 1]).groups.state.pending
    part = OrchestratorPart(
        progress=RunTotals(step=Step(step)),
        sampler=SamplerState(next_group_id=pending.next_group_id),
        buffer=BufferState(
            ready=[Group(group_id=group_id, env="e", example_id=0, rollouts=[]) for group_id in sorted(pending.ready)],
            in_flight=[make_draw(group_id) for group_id in sorted(pending.in_flight)],
        ),
        rollouts_per_example=2,
    )
    for name, content in ((ORCHESTRATOR, encode(part)), (TRAINER, b"shards")):
        (begin_part(layout, Step(step), name) / "state.msgpack").write_bytes(content)
        finish_part(layout, Step(step), name)
    return commit(layout, Step(step), run_id="run").digest


def _last_attempts(events: Sequence[AnyEvent]) -> set[int]:
    """Return the versions that exist at the end. After a resume a retired version may have been published again."""
    return set(replay_events(events).policies.published)


def _write_all_rollouts(layout: RunLayout, events: Sequence[AnyEvent]) -> None:
    steps = {event.step for event in events if isinstance(event, BatchFormed)}
    formed = replay_events(events, with_rollouts=steps).groups.formed
    for event in events:
        if isinstance(event, RolloutsWritten):
            groups = [
                Group(
                    group_id=group_id,
                    env=group.env,
                    example_id=group.example_id,
                    rollouts=[
                        Rollout(
                            index=index,
                            reward=group.reward_mean + sign / 4,
                            samples=[make_sample(version=group.oldest, newest=group.newest)],
                            completion=[{"role": "assistant", "content": f"answer {index} of group {group_id}"}],
                        )
                        for index, sign in enumerate((-1, 1))
                    ],
                )
                for group_id, group in formed[event.step].items()
            ]
            event.digest = write_rollouts(layout, event.step, groups).digest
