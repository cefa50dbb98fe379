"""Prepares the attempts of one run: chooses the checkpoint of each attempt, plans its processes and writes their configurations.

`launcher.run` makes it, and the supervisor uses it. The run directory and the ports are kept from the first attempt to the last.
"""

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass, field, replace

import msgspec

from trivet.checkpoints.commit import committed_steps, verify_checkpoint
from trivet.checkpoints.resume import choose_resume_step
from trivet.checkpoints.run_record import require_newest_attempt
from trivet.checkpoints.settings import SERVER_MAY_CHANGE, describe_changes, find_changes, flatten_config, read_settings
from trivet.config.layout import RunLayout
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import CkptConfig, RunIdentity, SteppingRoleConfig
from trivet.errors import CheckpointError
from trivet.key_names import key_name
from trivet.launcher.logs import RunLog
from trivet.launcher.plan import ORIGIN, ProcessSpec, RecoveryUnit, RunPlan
from trivet.launcher.run_directory import RunDirectory, Scratch, write_configs
from trivet.storage.durable import write_atomically
from trivet.telemetry.events import EventWriter, read_events
from trivet.weights.retention import needed_to_resume, reference_version_after
from trivet.wire.events import Event, Stop
from trivet.wire.versions import START_VERSION, Step

_TRAINING_FILES = ("orchestrator.toml", "trainer.toml")
"""Names of the configuration files of the roles that go back to a checkpoint. Servers keep running meanwhile."""


@dataclass(slots=True, kw_only=True)
class Attempts:
    """The current attempt of a run, from which the next one is made."""

    config: RLConfig
    """The resolved configuration."""
    directory: RunDirectory
    run: RunIdentity
    """Id of the run, and number of the current attempt."""
    from_step: Step | None
    """The step from which the current attempt resumed; None when it started from the start model."""
    make_plan: Callable[[RLConfig, RunIdentity, Step | None], RunPlan]
    """Plans an attempt that resumes from a step: `launcher.plan.plan` on one machine."""
    scratch: Scratch | None
    """The directory for temporary files of the processes, which run on this machine; None when they run on others."""
    planned: RunPlan = field(init=False)
    """The plan of the current attempt."""
    notices: list[str] = field(default_factory=list[str])
    """Findings of `begin` that the user should know."""

    def __post_init__(self) -> None:
        self.planned = self._plan()

    @property
    def layout(self) -> RunLayout:
        """Paths of the run's files."""
        return self.directory.layout

    @property
    def max_steps(self) -> int | None:
        """The last step of the run; None for a run without end."""
        return self.config.trainer.max_steps

    @property
    def last_commit(self) -> Step | None:
        """Step of the newest committed checkpoint, None for none."""
        return max(committed_steps(self.layout), default=None)

    @property
    def is_last_step_committed(self) -> bool:
        """True when the last step of the run is committed, so that nothing is left to do."""
        last = self.last_commit
        return last is not None and self.max_steps is not None and last >= self.max_steps

    def begin(self) -> None:
        """Prepare the directory for the first attempt, and write the roles' configurations.

        Raises:
            ConfigError: the checkpoint to resume from is damaged; nothing was removed.
            ResumeError: a setting that a resumed run must keep has changed.
        """
        trainer, versions = self.config.trainer, set[int]()
        resume_from = trainer.ckpt.resume_from
        if resume_from is None:
            for section in self.planned.configs.values():
                if isinstance(section, SteppingRoleConfig):
                    # `directory.begin` verifies every file of the checkpoint before it removes anything.
                    choose_resume_step(section, is_whole_verified=True)
            if self.from_step is not None:
                self.notices += self._describe_changed_servers()
        elif self.from_step:
            # Older policies of the other run which this fork needs: to sample from them, or as its reference policy.
            versions = needed_to_resume([self.from_step], lag=trainer.max_async_level if self.config.deterministic else 0)
            if trainer.loss.beta:
                versions.add(reference_version_after(self.from_step, interval=trainer.loss.reference_update_interval))
            versions -= {self.from_step, START_VERSION}
        self.directory.begin(self.run, resumed_from=self.from_step, resume_from=resume_from, versions=versions)
        write_configs(self.planned.configs)
        self.name_servers()

    def begin_next(self, log: RunLog) -> None:
        """Prepare the next attempt, from the newest checkpoint that is whole, or from the start of the run when there is none.

        Call this after orchestrator and trainer have ended.

        Raises:
            CheckpointError: there are checkpoints, and none is whole; or a later attempt has begun elsewhere.
        """
        require_newest_attempt(self.layout, self.run)
        newest = self._newest_whole(log)
        if newest is not None and newest != self.from_step:
            self.from_step = newest
            # `ckpt.skip_*` is about the checkpoint from which the user resumed. From its own checkpoints a run restores everything.
            skip_nothing = {name: False for name in CkptConfig.model_fields if name.startswith("skip_")}
            for name, role in (("trainer", self.config.trainer), ("orchestrator", self.config.orchestrator)):
                ckpt = role.ckpt.model_copy(update=skip_nothing)
                self.config = self.config.model_copy(update={name: role.model_copy(update={"ckpt": ckpt})})
        self.run = self.run.model_copy(update={"attempt": self.run.attempt + 1})
        self.directory.begin_next(self.run)
        self.planned = self._plan()
        write_configs({path: config for path, config in self.planned.configs.items() if path.name in _TRAINING_FILES})

    def plan_again(self, servers: Collection[RecoveryUnit]) -> None:
        """Plan the current attempt again before `servers` are restarted: their nodes may have returned at other addresses.

        A run on one node keeps its plan.
        """
        if not self.config.deployment.is_multi_node:
            return
        self.planned = self._plan()
        write_configs({path: config for path, config in self.planned.configs.items() if path.stem in servers})

    def plan_joined(self) -> list[ProcessSpec]:
        """Plan the current attempt again after nodes came for the first time; return the processes of the units that are new."""
        before = {spec.unit for spec in self.planned.processes}
        self.planned = self._plan()
        joined = [spec for spec in self.planned.processes if spec.unit not in before]
        names = {spec.unit for spec in joined}
        write_configs({path: config for path, config in self.planned.configs.items() if path.stem in names})
        return joined

    def has_completed(self, role: str) -> bool:
        """Return whether events.jsonl has a record of `role` that this attempt reached the last step, or a replay its end."""
        try:
            events = list(read_events(self.layout.events))
        except (FileNotFoundError, msgspec.DecodeError):
            return False
        return any(
            event.reason == "exhausted"
            or (event.reason == "done" and self.max_steps is not None and event.step >= self.max_steps)
            for event in events
            if isinstance(event, Stop) and (event.role, event.attempt) == (role, self.run.attempt)
        )

    def record(self, event: Event) -> None:
        """Append an event of the launcher to events.jsonl."""
        with closing(EventWriter(self.layout.events, role="launcher", attempt=self.run.attempt)) as writer:
            writer.write(event)

    def name_servers(self, *, without: Collection[RecoveryUnit] = ()) -> None:
        """Write the servers' addresses into the file that the orchestrator reads. A run on one node has no such file.

        Args:
            without: units whose servers have failed, which are left out: the orchestrator would wait for a lost node. If no server
                would remain, all are written.
        """
        if self.planned.servers_file is None:
            return
        all_urls = {unit: urls for unit, urls in self.planned.server_urls.items() if unit != ORIGIN}
        remaining = {unit: urls for unit, urls in all_urls.items() if unit not in without} or all_urls
        text = "".join(f"{url}\n" for urls in remaining.values() for url in urls)
        write_atomically(self.planned.servers_file, text.encode())

    def _plan(self) -> RunPlan:
        """Plan the current attempt. Every node of several has a directory for temporary files of its own."""
        planned, scratch = self.make_plan(self.config, self.run, self.from_step), self.scratch
        if scratch is None:
            return planned
        return replace(planned, processes=tuple(map(scratch.redirect, planned.processes)))

    def _newest_whole(self, log: RunLog) -> Step | None:
        """Return the step of the newest checkpoint that is whole; None when there are no checkpoints."""
        steps = committed_steps(self.layout)
        for step in reversed(steps):
            try:
                verify_checkpoint(self.layout, step)
            except CheckpointError as exc:
                log.say(f"checkpoint of step {step} is passed over: {exc}")
            else:
                return step
        if steps:
            raise CheckpointError(
                f"none of the checkpoints of steps {', '.join(map(str, steps))} is whole; see above. "
                f"Start anew with {key_name('--clean')}, or from weights with --model.name"
            )
        return None

    def _describe_changed_servers(self) -> list[str]:
        """Return a notice for each changed setting with which a server may sample differently than before the resume."""
        notices: list[str] = []
        for path, config in self.planned.configs.items():
            if isinstance(config, InferenceConfig) and path.exists():
                saved, now, defaults = read_settings(path), flatten_config(config), flatten_config(InferenceConfig())
                section = "teacher_inference" if config.is_teacher else "inference"
                changed = describe_changes(find_changes(saved, now, defaults=defaults, allowed=SERVER_MAY_CHANGE))
                notices += [f"{section}.{line}: the server may answer otherwise than before the resume" for line in changed]
        return list(dict.fromkeys(notices))
