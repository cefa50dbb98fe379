"""Proves from what a run left behind that it kept invariants 1 to 4, or names what broke which. Called by `trivet check`.

Reads events.jsonl twice, one line at a time: first for the steps that attempts started from, then everything. Works on a run
that is still going, up to where its file reached.
"""

from dataclasses import dataclass

from trivet.checkpoints.orchestrator_part import OwedGroups, read_owed_groups
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import ConfigError
from trivet.history.breaches import Breach, Invariant
from trivet.history.chain import ChainHistory
from trivet.history.files import Files
from trivet.history.groups import GroupCounts
from trivet.history.outline import outline, read_lines
from trivet.history.replay import ORCHESTRATOR, Replay
from trivet.wire.events import Stop
from trivet.wire.versions import Step

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
    replay = Replay(
        extent.outline,
        max_off_policy_steps=_max_off_policy_steps(files),
        remembered=files.commits,
        with_rollouts=files.rollouts,
        inherited=_inherited(files, first_step),
    )
    if first_step and extent.outline.has_orchestrator and first_step not in files.commits:
        replay.ledger.not_examined.append(f"groups that the checkpoint of step {first_step} handed on: it has been removed")
    chain = ChainHistory(replay.ledger)
    for line in read_lines(layout.events, num_bytes=extent.num_bytes):
        replay.read(line.event, line=line.number)
        chain.read(line.text, role=line.event.role, place=line.place)
    replay.ledger.line = None
    replay.ledger.require(bool(replay.starts), Invariant.INTACT_RECORD, f"{layout.events} holds no start of a role")
    files.compare(replay, extent)
    replay.roles.report_clocks()
    chain.report_not_examined()
    return _report(replay)


def _report(replay: Replay) -> CheckReport:
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


def _inherited(files: Files, first_step: int) -> OwedGroups | None:
    """The groups of the checkpoint that the run began from; None for one that was removed, or without an orchestrator's part."""
    has_part = (files.layout.checkpoint_step(Step(first_step)) / ORCHESTRATOR).exists()
    return read_owed_groups(files.layout, Step(first_step)) if first_step in files.commits and has_part else None


def _max_off_policy_steps(files: Files) -> int:
    """Return the limit that the run's last attempt had; a run without an orchestrator does not use it."""
    value = files.config(ORCHESTRATOR).get("max_off_policy_steps")
    return value if isinstance(value, int) else OrchestratorConfig.model_fields["max_off_policy_steps"].default
