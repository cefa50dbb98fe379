from pathlib import Path

import pytest

from trivet.config.layout import RunLayout
from trivet.config.sections.environment import EnvConfig
from trivet.config.sections.rl import RLConfig
from trivet.config.sections.shared import RunIdentity
from trivet.errors import EnvironmentLoadError
from trivet.key_names import to_variable
from trivet.launcher.run import check
from trivet.launcher.supervision.attempts import has_completed, role_environment
from trivet.telemetry.events import EventWriter
from trivet.wire.events import Stop
from trivet.wire.versions import Step


def test_a_missing_environment_is_refused_with_the_command_that_installs_it() -> None:
    env = EnvConfig(id="owner/not-there")
    config = RLConfig.model_validate({"orchestrator": {"env": [env.model_dump()]}})
    with pytest.raises(EnvironmentLoadError, match="install it with: uv run trivet env install owner/not-there"):
        check(config)


def test_roles_do_not_inherit_keys_that_their_files_already_hold() -> None:
    assert role_environment({"TRIVET_WANDB__PROJECT": "p", "PATH": "/bin"}) == {"PATH": "/bin"}


def test_roles_name_keys_as_the_launcher_does() -> None:
    variable = to_variable({"seq_len": "trainer.args.max_seq_len"})
    assert role_environment(variable) == variable


@pytest.mark.parametrize(
    ("role", "step", "attempt", "expected"),
    [("trainer", 5, 2, True), ("trainer", 4, 2, False), ("trainer", 5, 1, False), ("orchestrator", 5, 2, False)],
)
def test_a_role_has_finished_when_it_recorded_the_last_step_in_this_attempt(
    tmp_path: Path, role: str, step: int, attempt: int, expected: bool
) -> None:
    layout = RunLayout(tmp_path)
    writer = EventWriter(layout.events, role=role, attempt=attempt)
    writer.write(Stop(step=Step(step), reason="done"))
    writer.close()
    assert has_completed(layout, "trainer", run=RunIdentity(attempt=2), max_steps=5) is expected


@pytest.mark.parametrize("max_steps", [None, 9])
def test_a_replay_has_finished_when_its_record_is_used_up(tmp_path: Path, max_steps: int | None) -> None:
    layout = RunLayout(tmp_path)
    writer = EventWriter(layout.events, role="trainer", attempt=1)
    writer.write(Stop(step=Step(4), reason="exhausted"))
    writer.close()
    assert has_completed(layout, "trainer", run=RunIdentity(), max_steps=max_steps)


def test_a_run_without_a_last_step_never_finishes(tmp_path: Path) -> None:
    assert has_completed(RunLayout(tmp_path), "trainer", run=RunIdentity(), max_steps=None) is False
