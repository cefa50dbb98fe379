"""Makes random histories of runs that keep every promise: crashes, resumes, retries, server losses and late commits."""

from collections.abc import Collection, Sequence
from pathlib import Path
from random import Random

import msgspec

from trivet.history.record import Outline
from trivet.history.run_history import RunHistory
from trivet.telemetry.events import seal
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
    RolloutsWritten,
    ServerDown,
    ServerUp,
    Start,
    Stop,
    Train,
)

MAX_OFF_POLICY_STEPS = 3
SERVERS = ("http://a", "http://b")
GROUPS_PER_BATCH = 2
_MAX_IN_FLIGHT = 6
_CRASH_RATE = 0.01
"""Seconds between two events. A step has about thirty."""


def digest_of_version(version: int) -> str:
    return f"digest-{version:04d}"


class RunMaker:
    """
    >>> events = RunMaker(Random(1), max_steps=20).run()
    """

    def __init__(self, random: Random, *, max_steps: int, max_crashes: int = 5) -> None:
        self._random = random
        self._crashes_left = random.randint(0, max_crashes)
        self._max_steps = max_steps
        self.events: list[AnyEvent] = []
        self._attempt = 0
        self._next_id = 0
        self._in_flight: dict[int, tuple[int, int]] = {}
        """The example and version of the last attempt."""
        self._waiting_again: list[int] = []
        self._examples: dict[int, int] = {}
        self._ready: dict[int, tuple[int, int]] = {}
        self._formed: dict[int, list[int]] = {}
        self._step = 0
        self._trained = 0
        self._held = 0
        self._up: list[str] = []
        self._published: list[int] = []
        self._commits: list[int] = []
        self._due: list[int] = []
        """Steps whose checkpoint is being written."""
        self._snapshots: dict[int, tuple[int, dict[int, tuple[int, int]], list[int]]] = {}

    def run(self) -> list[AnyEvent]:
        self._begin(0)
        while self._trained < self._max_steps:
            if self._crashes_left and self._random.random() < _CRASH_RATE:
                self._crashes_left -= 1
                self._crash()
            else:
                self._act()
        while self._due:
            self._commit()
        for role in ("orchestrator", "trainer"):
            self._write(role, Stop(step=self._trained, reason="done"))
        return self.events

    def _write(self, role: str, event: AnyEvent) -> None:
        event.role, event.attempt, event.time = role, self._attempt, float(len(self.events))
        self.events.append(event)

    def _begin(self, from_step: int) -> None:
        self._attempt += 1
        roles = ["orchestrator", "trainer"]
        self._random.shuffle(roles)
        for role in roles:
            self._write(role, Start(run_id="run", from_step=from_step))
        self._next_id, self._ready, again = self._snapshots.get(from_step, (0, {}, []))
        self._ready, self._in_flight, self._waiting_again = dict(self._ready), {}, list(again)
        self._formed, self._due = {}, []
        self._step = self._trained = from_step
        self._published = [version for version in self._published if version <= from_step]
        if from_step and self._random.random() < 0.3:
            self._publish(from_step)
        self._held = from_step
        self._up = list(SERVERS)
        for server in SERVERS:
            self._bring_up(server)

    def _bring_up(self, server: str) -> None:
        digest = digest_of_version(self._held)
        self._write("orchestrator", Load(version=self._held, digest=digest, server=server))
        self._write("orchestrator", ServerUp(version=self._held, digest=digest, server=server))

    def _crash(self) -> None:
        """Kill or end the run in order, perhaps with a commit that was not recorded yet. Resume from the newest or an older
        one."""
        if self._due and self._random.random() < 0.5:
            self._commits.append(self._due.pop(0))
        elif self._random.random() < 0.3:
            self._write("trainer", Stop(step=self._trained, reason="interrupted"))
        if self._commits and self._random.random() < 0.2:
            self._commits = self._commits[: self._random.randrange(1, len(self._commits) + 1)]
        self._begin(max(self._commits, default=0))

    def _act(self) -> None:
        choices = [self._dispatch, self._dispatch, self._finish, self._finish, self._form, self._train, self._load]
        choices += [self._fail, self._retry, self._lose_server, self._return_server, self._commit, self._retire]
        self._random.choice(choices)()

    def _dispatch(self) -> None:
        if len(self._in_flight) >= _MAX_IN_FLIGHT or not self._up:
            return
        if self._waiting_again:
            group_id = self._waiting_again.pop(0)
        else:
            group_id, self._next_id = self._next_id, self._next_id + 1
            self._examples[group_id] = self._random.randrange(100)
        self._start_try(group_id)

    def _start_try(self, group_id: int) -> None:
        example = self._examples[group_id]
        self._in_flight.pop(group_id, None)
        self._in_flight[group_id] = (example, self._held)
        server = self._random.choice(self._up)
        self._write("orchestrator", Dispatch(group_id=group_id, env="e", example_id=example, version=self._held, server=server))

    def _retry(self) -> None:
        if self._in_flight and self._up:
            self._start_try(self._random.choice(list(self._in_flight)))

    def _finish(self) -> None:
        if not self._in_flight:
            return
        group_id = self._random.choice(list(self._in_flight))
        _, version = self._in_flight.pop(group_id)
        oldest = self._random.randint(version, self._newest)
        newest = self._random.randint(oldest, self._newest)
        is_empty = self._random.random() < 0.05
        versions = (-1, -1) if is_empty else (oldest, newest)
        self._write(
            "orchestrator",
            Finish(
                group_id=group_id,
                reward_mean=0.5,
                oldest_version=versions[0],
                newest_version=versions[1],
                completion_tokens=3.0,
            ),
        )
        if is_empty or self._random.random() < 0.2:
            self._write("orchestrator", Filter(group_id=group_id, reason="no signal"))
        else:
            self._ready[group_id] = (oldest, newest)

    def _fail(self) -> None:
        if self._in_flight:
            group_id = self._random.choice(list(self._in_flight))
            del self._in_flight[group_id]
            self._write("orchestrator", Drop(group_id=group_id, reason="failed: the environment raised"))

    def _form(self) -> None:
        step = self._step + 1
        if self._step - self._trained >= 2 or step > self._max_steps:
            return
        allowed = step - 1 - MAX_OFF_POLICY_STEPS
        for group_id in [group_id for group_id, (_, version) in self._in_flight.items() if version < allowed]:
            del self._in_flight[group_id]
            self._write("orchestrator", Drop(group_id=group_id, reason="stale"))
        for group_id in [group_id for group_id, (oldest, _) in self._ready.items() if oldest < allowed]:
            del self._ready[group_id]
            self._write("orchestrator", Drop(group_id=group_id, reason="stale"))
        if len(self._ready) < GROUPS_PER_BATCH:
            return
        chosen = list(self._ready)[:GROUPS_PER_BATCH]
        versions = [self._ready.pop(group_id) for group_id in chosen]
        oldest, newest = min(old for old, _ in versions), max(new for _, new in versions)
        self._write("orchestrator", BatchFormed(step=step, group_ids=chosen, oldest_version=oldest, newest_version=newest))
        self._step = step
        if self._random.random() < 0.95:  # else killed before they were written, or not known yet
            self._write("orchestrator", RolloutsWritten(step=step, num_rollouts=2 * len(chosen), digest=""))
        self._formed[step] = list(chosen)
        self._snapshots[step] = (self._next_id, dict(self._ready), [*self._in_flight, *self._waiting_again])

    def _train(self) -> None:
        step = self._trained + 1
        if step not in self._formed:
            return
        self._write("trainer", Train(step=step, group_ids=self._formed.pop(step)))
        self._trained = step
        self._publish(step)
        if step % 3 == 0 or step == self._max_steps:
            self._due.append(step)

    def _publish(self, version: int) -> None:
        self._write("trainer", Publish(version=version, digest=digest_of_version(version)))
        if version not in self._published:
            self._published.append(version)

    def _commit(self) -> None:
        if self._due:
            step = self._due.pop(0)
            self._write("trainer", Commit(step=step, digest=f"commit-{step}"))
            self._commits.append(step)

    def _load(self) -> None:
        if self._newest > self._held and self._up:
            self._held = self._newest
            for server in self._up:
                self._write("orchestrator", Load(version=self._held, digest=digest_of_version(self._held), server=server))

    def _lose_server(self) -> None:
        if len(self._up) > 1:
            server = self._random.choice(self._up)
            self._up.remove(server)
            self._write("orchestrator", ServerDown(server=server, reason="it refused a connection"))

    def _return_server(self) -> None:
        for server in SERVERS:
            if server not in self._up:
                self._bring_up(server)
                self._up.append(server)
                return

    def _retire(self) -> None:
        kept = {*self._commits, *self._due}
        for version in self._published:
            if version < self._held and version not in kept:
                self._published.remove(version)
                self._write("trainer", Retire(version=version))
                return

    @property
    def _newest(self) -> int:
        return max(self._published, default=0)


def replay_events(events: Sequence[AnyEvent], *, with_rollouts: Collection[int] = (), first_step: int = 0) -> RunHistory:
    """Replay events alone, as the checker does, without files.

    Args:
        with_rollouts: steps whose groups are kept.
        first_step: what the run itself began from.
    """
    outline = Outline(
        start_steps=frozenset(int(event.from_step) for event in events if isinstance(event, Start)),
        has_orchestrator=any(event.role == "orchestrator" for event in events),
        first_step=first_step,
    )
    history = RunHistory(outline, max_off_policy_steps=MAX_OFF_POLICY_STEPS, with_rollouts=with_rollouts)
    for line, event in enumerate(events, start=1):
        history.read(event, line=line)
    return history


def write_events(path: Path, events: Sequence[AnyEvent]) -> None:
    """Write the events of a history."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = bytearray()
    last: dict[str, bytes] = {}
    for event in events:
        line, last[event.role] = seal(msgspec.json.encode(event), offset=len(content), last=last.get(event.role, b""))
        content += line
    path.write_bytes(content)


def assert_proven(report: RunHistory) -> RunHistory:
    breaches = report.ledger.breaches
    assert not breaches, "\n".join(f"line {breach.line}: {breach.reason}" for breach in breaches[:10])
    return report
