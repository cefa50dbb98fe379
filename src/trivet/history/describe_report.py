"""Describes a report of the checker in text, for the terminal."""

from collections.abc import Iterator
from pathlib import Path

from trivet.history.breaches import Breach, Invariant
from trivet.history.check import CheckReport

_NAMES = {
    Invariant.EXACTLY_ONCE: "exactly once",
    Invariant.VERSIONS_TELL_THE_TRUTH: "versions tell the truth",
    Invariant.ONE_COMMIT: "one commit",
    Invariant.READERS_ARE_SAFE: "readers are safe",
    Invariant.INTACT_RECORD: "intact record",
}
_MAX_BREACHES = 10
"""The first is the cause; what comes after it often only follows."""


def describe_report(report: CheckReport, *, events: Path) -> str:
    """Return the lines that `trivet check` prints; `events` is read for the lines that break an invariant."""
    return "\n".join(_lines(report, events))


def _lines(report: CheckReport, events: Path) -> Iterator[str]:
    yield f"run {report.run_id}: {report.num_events:,} events, {_describe_end(report)}"
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


def _describe_end(report: CheckReport) -> str:
    if report.last_stop is None:
        return f"at step {report.last_step}, running or killed"
    return f"{report.last_stop.reason} at step {report.last_step}"


def _describe(breach: Breach, events: Path) -> Iterator[str]:
    where = f"{events.name}:{breach.line}: " if breach.line is not None else ""
    invariant = f"invariant {breach.invariant.value} ({_NAMES[breach.invariant]})"
    name = invariant if breach.invariant is not Invariant.INTACT_RECORD else _NAMES[breach.invariant]
    yield f"  {where}{name}: {breach.reason}"
    if breach.line is not None:
        yield f"    | {_line(events, breach.line)}"


def _line(events: Path, number: int) -> str:
    with events.open("rb") as file:
        for line, text in enumerate(file, start=1):
            if line == number:
                return text.decode(errors="replace").rstrip()
    return ""
