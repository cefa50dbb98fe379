"""A launcher with stand-in roles: `python stand_in_run.py RECOVERY BEHAVIOUR BEHAVIOUR BEHAVIOUR PORT PORT PORT`.

RECOVERY is the section `[recovery]` as JSON; the rest in the order inference, orchestrator, trainer. The working directory is
the output directory. A file `last_step_committed` in it says that the last step's checkpoint is there.
"""

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.config.schema.deployment import RecoveryConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import RunIdentity
from trivet.errors import TrivetError
from trivet.launcher.logs import RunLog
from trivet.launcher.plan import TRAINING, ProcessSpec, RecoveryUnit, RunPlan, report_files
from trivet.launcher.processes import LocalHost
from trivet.launcher.run_directory import RunDirectory
from trivet.launcher.supervision.supervisor import Supervisor
from trivet.process.lifetime import adopt_orphans
from trivet.telemetry.events import EventWriter
from trivet.wire.events import Event
from trivet.wire.versions import Step

_ROLE = Path(__file__).with_name("stand_in_role.py")
_NAMES = ("inference", "orchestrator", "trainer")


@dataclass(kw_only=True)
class StandInAttempts:
    """Attempts of which each starts the run from its beginning."""

    layout: RunLayout
    config: RLConfig
    behaviours: Sequence[str]
    ports: Sequence[str]
    run: RunIdentity = field(default_factory=RunIdentity)
    from_step: Step | None = None
    max_steps: int | None = 3
    last_commit: Step | None = None

    @property
    def is_last_step_committed(self) -> bool:
        return (self.layout.root / "last_step_committed").exists()

    @property
    def planned(self) -> RunPlan:
        specs = [
            ProcessSpec(
                name=name,
                unit=RecoveryUnit(name) if name == "inference" else TRAINING,
                argv=(sys.executable, str(_ROLE), name, behaviour, port, str(self.run.attempt)),
                log=self.layout.log_file(f"{name}.stdout"),
                env={},
                env_defaults={},
                does_finish=name != "inference",
                reports=report_files(self.layout, name),
                are_children_watched=name != "orchestrator",
            )
            for name, behaviour, port in zip(_NAMES, self.behaviours, self.ports, strict=True)
        ]
        return RunPlan(processes=tuple(specs), configs={}, notices=(), server_urls={RecoveryUnit("inference"): ()})

    def plan_again(self, servers: Collection[RecoveryUnit]) -> None: ...

    def name_servers(self, *, without: Collection[RecoveryUnit] = ()) -> None: ...

    def begin_next(self, log: RunLog) -> None:
        self.run = self.run.model_copy(update={"attempt": self.run.attempt + 1})

    def has_completed(self, role: str) -> bool:
        return (self.layout.root / f"{role}.done").exists()

    def record(self, event: Event) -> None:
        writer = EventWriter(self.layout.events, role="launcher", attempt=self.run.attempt)
        writer.write(event)
        writer.close()


def main(recovery: str, behaviours: list[str], ports: list[str]) -> int:
    adopt_orphans()
    layout = RunLayout(Path.cwd())
    limits = {"recovery": RecoveryConfig.model_validate_json(recovery), "shutdown_timeout_s": 2.0}
    config = RLConfig().model_copy(update=limits)
    attempts = StandInAttempts(layout=layout, config=config, behaviours=behaviours, ports=ports)
    with RunDirectory(layout) as directory:
        directory.begin(attempts.run, resumed_from=None)
        layout.logs.mkdir()
        with layout.log_file("rl.log").open("a") as file:
            return Supervisor(
                attempts,
                host=LocalHost(python=sys.executable, environ=os.environ),
                log=RunLog(sys.stdout, file),
            ).run()


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1], sys.argv[2:5], sys.argv[5:8]))
    except TrivetError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from error
