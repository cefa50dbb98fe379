"""Proves from a run's files that the run kept invariants 1 to 4, or names each breach and its invariant. Called by `trivet check`.

It reads events.jsonl twice, one line at a time: first the steps from which attempts started, then all events. A run that is still
running is checked up to the length that the file had at the start.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

from trivet.checkpoints.orchestrator_part import read_pending_groups
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import ConfigError
from trivet.history.files import Files
from trivet.history.ledger import Invariant
from trivet.history.record import ChainHistory, read_lines, read_outline
from trivet.history.run_history import ORCHESTRATOR, RunHistory
from trivet.wire.versions import Step

_MAX_BREACHES = 10
"""Limit of breaches that are printed. The first is the cause, and later ones are often only consequences of it."""
_NEVER_EXAMINED = (
    "edits that recompute the chain",
    "what lies in logs/, metrics/, evals/ and configs/ beyond the values that were used; and of what the orchestrator's part of a "
    "checkpoint means, all but the groups that it holds",
)


def check_run(layout: RunLayout) -> RunHistory:
    """Check a run's events and compare its files with them. The ledger of the returned history has the findings.

    Raises:
        ConfigError: the directory has no events of a run.
        HistoryError: a line of events.jsonl is not an event.
        CheckpointError: the checkpoint that the run was forked from cannot be read.
    """
    if not layout.events.exists():
        raise ConfigError(f"{str(layout.root)!r} holds no {layout.events.name}: no run wrote there; give the output_dir of one")
    files = Files(layout)
    outline = read_outline(layout.events, does_count_attempts=files.has_launcher)
    first_step = outline.first_step
    limit = files.configs.get(ORCHESTRATOR, {}).get("max_off_policy_steps")
    if not isinstance(limit, int):  # a run without an orchestrator has no such key and needs no limit
        limit = OrchestratorConfig.model_fields["max_off_policy_steps"].default
    has_part = first_step in files.commits and (layout.checkpoint_step(Step(first_step)) / ORCHESTRATOR).exists()
    history = RunHistory(
        outline,
        max_off_policy_steps=limit,
        remembered=files.commits,
        with_rollouts=files.rollouts,
        inherited=read_pending_groups(layout, Step(first_step)) if has_part else None,
    )
    ledger = history.ledger
    if first_step and outline.has_orchestrator and first_step not in files.commits:
        ledger.not_examined.append(f"groups that the checkpoint of step {first_step} handed on: it has been removed")
    chain = ChainHistory(ledger)
    for line in read_lines(layout.events, num_bytes=outline.num_bytes):
        history.read(line.event, line=line.number)
        chain.read(line)
    ledger.line = None
    ledger.require(bool(history.starts), Invariant.INTACT_RECORD, f"{layout.events} holds no start of a role")
    files.compare(history)
    history.roles.report_clocks()
    ledger.not_examined += _NEVER_EXAMINED
    return history


def report_values(history: RunHistory) -> dict[str, object]:
    """Return what `trivet check --json` prints. `breaches` is empty if the run keeps its guarantees."""
    ledger, groups = history.ledger, history.groups.state
    return {
        "run_id": history.run_id,
        "num_events": history.num_events,
        "last_step": history.last_step,
        "ended": history.last_stop.reason if history.last_stop else None,
        "groups": {
            "dispatched": groups.dispatched,
            "batched": groups.batched,
            "filtered": dict(groups.filtered),
            "dropped": dict(groups.dropped),
            "ready": len(groups.pending.ready),
            "in_flight": len(groups.pending.in_flight),
        },
        "checks": ledger.checks,
        "breaches": [
            {"invariant": breach.invariant.name.lower(), "line": breach.line, "reason": breach.reason}
            for breach in ledger.breaches
        ],
        "remarks": ledger.remarks,
        "not_examined": ledger.not_examined,
    }


def describe_report(history: RunHistory, *, events: Path) -> Iterator[str]:
    """Yield the lines that `trivet check` prints. Lines that break an invariant are quoted from the file `events`."""
    ledger, stop = history.ledger, history.last_stop
    end = f"{stop.reason} at step {history.last_step}" if stop else f"at step {history.last_step}, running or killed"
    yield f"run {history.run_id}: {history.num_events:,} events, {end}"
    groups, pending = history.groups.state, history.groups.state.pending
    yield (
        f"groups: {groups.dispatched:,} dispatched = {groups.batched:,} in batches + {groups.filtered.total():,} filtered + "
        f"{groups.dropped.total():,} dropped + {len(pending.ready):,} ready + {len(pending.in_flight):,} in flight; "
        f"{groups.tried_again:,} tried again"
    )
    for name, reasons in (("filtered", groups.filtered), ("dropped", groups.dropped)):
        if reasons:
            yield f"  {name}: " + ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
    yield (
        f"starts: {', '.join(f'{count} of the {role}' for role, count in history.starts.items())}; taken back and done again: "
        f"{history.voided_steps:,} steps, {history.groups.voided:,} groups"
    )
    commits = f", the newest of step {max(history.commits)}" if history.commits else ""
    found = history.policies.probe_mismatches
    probes = f", {len(found):,} probes reproduced to at most {max(found):.2g} nats" if found else ""
    yield f"policies: {history.policies.num_loads:,} loads{probes}; checkpoints: {len(history.commits):,} commits{commits}"
    for remark in ledger.remarks:
        yield f"note: {remark}"
    if not ledger.breaches:
        yield f"consistent: {ledger.checks:,} statements hold (invariants 1 to 4)"
    else:
        yield f"broken: {len(ledger.breaches)} of {ledger.checks:,} statements do not hold"
    for breach in ledger.breaches[:_MAX_BREACHES]:
        where = f"{events.name}:{breach.line}: " if breach.line is not None else ""
        name = breach.invariant.name.lower().replace("_", " ")
        if breach.invariant is not Invariant.INTACT_RECORD:
            name = f"invariant {breach.invariant.value} ({name})"
        yield f"  {where}{name}: {breach.reason}"
        if breach.line is not None:
            with events.open("rb") as file:
                text = next(itertools.islice(file, breach.line - 1, None), b"")
            yield f"    | {text.decode(errors='replace').rstrip()}"
    if len(ledger.breaches) > _MAX_BREACHES:
        yield f"  and {len(ledger.breaches) - _MAX_BREACHES} more, which may follow from these"
    yield "not examined:"
    yield from (f"  {what}" for what in ledger.not_examined)
