"""Proves from what a run left behind that it kept invariants 1 to 4, or names what broke which. Called by `trivet check`.

Reads events.jsonl twice, one line at a time: first for the steps that attempts started from, then everything. Works on a run
that is still going, up to where its file reached.
"""

import tomllib
from dataclasses import dataclass

from trivet.config.layout import RunLayout
from trivet.config.orchestrator import OrchestratorConfig
from trivet.errors import ConfigError
from trivet.history.breaches import Breach
from trivet.history.files import Files
from trivet.history.groups import GroupCounts, Owed
from trivet.history.outline import Extent, outline, read_numbered
from trivet.history.replay import Replay
from trivet.wire.events import Stop
from trivet.wire.versions import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    run_id: str
    num_events: int
    num_checks: int
    breaches: list[Breach]
    starts: dict[str, int]
    """By role."""
    last_step: int
    last_batch: int
    last_stop: Stop | None
    """How the trainer ended; None while it runs, or when it was killed."""
    groups: GroupCounts
    live: Owed
    """Groups that have not ended: still going, or owed by the last checkpoint."""
    voided_groups: int
    voided_steps: int
    num_loads: int
    commits: list[int]
    """Committed steps that count, in the history."""


def check_run(layout: RunLayout) -> Report:
    """
    Raises:
        ConfigError: no run wrote there.
        HistoryError: a line is no event.
        CheckpointError: the checkpoint that the run was forked from cannot be read.
    """
    if not layout.events.exists():
        raise ConfigError(f"{str(layout.root)!r} holds no {layout.events.name}: no run wrote there; give the output_dir of one")
    files = Files(layout)
    extent = outline(layout.events)
    replay = Replay(
        extent.outline,
        max_off_policy_steps=_max_off_policy_steps(layout),
        remembered=files.commits,
        inherited=_inherited(files, extent),
    )
    for line, event in read_numbered(layout.events, num_bytes=extent.num_bytes):
        replay.read(event, line=line)
    files.compare(replay)
    return _report(replay)


def _report(replay: Replay) -> Report:
    return Report(
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
        commits=sorted(replay.steps.commits),
    )


def _inherited(files: Files, extent: Extent) -> Owed | None:
    return files.owed(Step(extent.first_step)) if extent.first_step else None


def _max_off_policy_steps(layout: RunLayout) -> int:
    """As the run's last attempt had it; a run without an orchestrator has no use for it."""
    file = layout.configs / "orchestrator.toml"
    values = tomllib.loads(file.read_text()) if file.exists() else {}
    return int(values.get("max_off_policy_steps", OrchestratorConfig.model_fields["max_off_policy_steps"].default))
