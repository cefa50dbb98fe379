"""Proves from what a run left behind that it kept invariants 1 to 4, or names what broke which. Called by `trivet check`.

Reads events.jsonl twice, one line at a time: first for the steps that attempts started from, then everything. Works on a run
that is still going, up to where its file reached.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trivet.checkpoints.orchestrator_part import OwedGroups, read_owed_groups
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import ConfigError
from trivet.history.breaches import Breach, Invariant
from trivet.history.files import Files
from trivet.history.groups import GroupCounts
from trivet.history.record import ChainHistory, outline, read_lines
from trivet.history.replay import ORCHESTRATOR, Replay
from trivet.wire.events import Stop
from trivet.wire.versions import Step

_NAMES = {
    Invariant.EXACTLY_ONCE: "exactly once",
    Invariant.VERSIONS_TELL_THE_TRUTH: "versions tell the truth",
    Invariant.ONE_COMMIT: "one commit",
    Invariant.READERS_ARE_SAFE: "readers are safe",
    Invariant.INTACT_RECORD: "intact record",
}
_MAX_BREACHES = 10
"""The first is the cause; what comes after it often only follows."""
_NEVER_EXAMINED = (
    "what lies in logs/, metrics/, evals/ and configs/ beyond the values that were used; and of what the orchestrator's part of a "
    "checkpoint means, all but the groups that it holds"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The findings of one check, and the numbers of the run."""

    run_id: str
    num_events: int
    num_checks: int
    breaches: list[Breach]
    starts: dict[str, int]
    """Number of starts by role."""
    last_step: int
    last_batch: int
    last_stop: Stop | None
    """The trainer's end; None while it runs, or when it was killed."""
    groups: GroupCounts
    live: OwedGroups
    """Groups that have not ended: still going, or owed by the last checkpoint."""
    voided_groups: int
    voided_steps: int
    num_loads: int
    probe_mismatches: list[float]
    """Mean difference of log-probabilities, in nats, of each load that had a probe to reproduce."""
    commits: list[int]
    """Committed steps that count, in the history."""
    remarks: list[str]
    """Observations that are unusual and break nothing."""
    not_examined: list[str]
    """Things about which no statement was made, with the reason."""


def check_run(layout: RunLayout) -> CheckReport:
    """Compare everything that a run left behind with its history.

    Raises:
        ConfigError: no run wrote there.
        HistoryError: a line is no event.
        CheckpointError: the checkpoint that the run was forked from cannot be read.
    """
    if not layout.events.exists():
        raise ConfigError(f"{str(layout.root)!r} holds no {layout.events.name}: no run wrote there; give the output_dir of one")
    files = Files(layout)
    extent = outline(layout.events, does_count_attempts=files.has_launcher)
    first_step = extent.outline.first_step
    limit = files.config(ORCHESTRATOR).get("max_off_policy_steps")  # of the last attempt; not used without an orchestrator
    has_part = first_step in files.commits and (layout.checkpoint_step(Step(first_step)) / ORCHESTRATOR).exists()
    replay = Replay(
        extent.outline,
        max_off_policy_steps=limit
        if isinstance(limit, int)
        else OrchestratorConfig.model_fields["max_off_policy_steps"].default,
        remembered=files.commits,
        with_rollouts=files.rollouts,
        inherited=read_owed_groups(layout, Step(first_step)) if has_part else None,
    )
    if first_step and extent.outline.has_orchestrator and first_step not in files.commits:
        replay.ledger.not_examined.append(f"groups that the checkpoint of step {first_step} handed on: it has been removed")
    chain = ChainHistory(replay.ledger)
    for line in read_lines(layout.events, num_bytes=extent.num_bytes):
        replay.read(line.event, line=line.number)
        chain.read(line)
    replay.ledger.line = None
    replay.ledger.require(bool(replay.starts), Invariant.INTACT_RECORD, f"{layout.events} holds no start of a role")
    files.compare(replay, extent)
    replay.roles.report_clocks()
    chain.report_not_examined()
    return CheckReport(
        run_id=replay.run_id,
        num_events=replay.num_events,
        num_checks=replay.ledger.checks,
        breaches=replay.ledger.breaches,
        starts=replay.starts,
        last_step=replay.steps.last_step,
        last_batch=replay.groups.last_batch,
        last_stop=replay.last_stop,
        groups=replay.groups.counts,
        live=replay.groups.live,
        voided_groups=replay.groups.voided,
        voided_steps=replay.steps.voided,
        num_loads=replay.policies.num_loads,
        probe_mismatches=replay.policies.probe_mismatches,
        commits=sorted(replay.steps.commits),
        remarks=replay.ledger.remarks,
        not_examined=[*replay.ledger.not_examined, _NEVER_EXAMINED],
    )


def describe_report(report: CheckReport, *, events: Path) -> str:
    """Return the lines that `trivet check` prints; `events` is read for the lines that break an invariant."""
    return "\n".join(_lines(report, events))


def _lines(report: CheckReport, events: Path) -> Iterator[str]:
    stop = report.last_stop
    end = f"{stop.reason} at step {report.last_step}" if stop else f"at step {report.last_step}, running or killed"
    yield f"run {report.run_id}: {report.num_events:,} events, {end}"
    groups, live = report.groups, report.live
    yield (
        f"groups: {groups.dispatched:,} dispatched = {groups.batched:,} in batches + {groups.filtered.total():,} filtered + "
        f"{groups.dropped.total():,} dropped + {len(live.ready):,} ready + {len(live.in_flight):,} in flight; "
        f"{groups.tried_again:,} tried again"
    )
    for name, reasons in (("filtered", groups.filtered), ("dropped", groups.dropped)):
        if reasons:
            yield f"  {name}: " + ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
    yield (
        f"starts: {', '.join(f'{count} of the {role}' for role, count in report.starts.items())}; taken back and done again: "
        f"{report.voided_steps:,} steps, {report.voided_groups:,} groups"
    )
    commits = f", the newest of step {report.commits[-1]}" if report.commits else ""
    found = report.probe_mismatches
    probes = f", {len(found):,} probes reproduced to at most {max(found):.2g} nats" if found else ""
    yield f"policies: {report.num_loads:,} loads{probes}; checkpoints: {len(report.commits):,} commits{commits}"
    for remark in report.remarks:
        yield f"note: {remark}"
    if not report.breaches:
        yield f"consistent: {report.num_checks:,} statements hold (invariants 1 to 4)"
    else:
        yield from _breaches(report, events)
    yield "not examined:"
    yield from (f"  {what}" for what in report.not_examined)


def _breaches(report: CheckReport, events: Path) -> Iterator[str]:
    yield f"broken: {len(report.breaches)} of {report.num_checks:,} statements do not hold"
    for breach in report.breaches[:_MAX_BREACHES]:
        yield from _describe(breach, events)
    if len(report.breaches) > _MAX_BREACHES:
        yield f"  and {len(report.breaches) - _MAX_BREACHES} more, which may follow from these"


def _describe(breach: Breach, events: Path) -> Iterator[str]:
    where = f"{events.name}:{breach.line}: " if breach.line is not None else ""
    invariant = f"invariant {breach.invariant.value} ({_NAMES[breach.invariant]})"
    name = invariant if breach.invariant is not Invariant.INTACT_RECORD else _NAMES[breach.invariant]
    yield f"  {where}{name}: {breach.reason}"
    if breach.line is not None:
        with events.open("rb") as file:
            text = next(itertools.islice(file, breach.line - 1, None), b"")
        yield f"    | {text.decode(errors='replace').rstrip()}"
