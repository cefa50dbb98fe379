"""What `rl` checks before it starts anything, and when a role counts as having finished."""

from pathlib import Path

import pytest

from trivet.config.layout import RunLayout
from trivet.config.orchestrator import EnvConfig
from trivet.config.rl import RLConfig
from trivet.config.shared import RunIdentity
from trivet.errors import EnvironmentLoadError
from trivet.launcher.preflight import check_environments
from trivet.launcher.rl import check, has_completed
from trivet.telemetry.events import EventWriter
from trivet.wire.events import Stop
from trivet.wire.versions import Step


def test_an_installed_environment_is_found_under_its_module_name() -> None:
    check_environments([EnvConfig(id="owner/email")])


def test_a_missing_environment_of_this_checkout_names_its_folder(tmp_path: Path) -> None:
    (tmp_path / "not_there").mkdir()
    with pytest.raises(EnvironmentLoadError, match=r"uv pip install -e .*not_there") as error:
        check_environments([EnvConfig(id="not-there")], environments_dir=tmp_path)
    assert error.value.exit_code == 2


def test_a_missing_environment_is_refused_with_the_command_that_installs_it() -> None:
    env = EnvConfig(id="owner/not-there")
    config = RLConfig.model_validate({"orchestrator": {"env": [env.model_dump()]}})
    with pytest.raises(EnvironmentLoadError, match="install it with: uv pip install not-there"):
        check(config)


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


def test_a_run_without_a_last_step_never_finishes(tmp_path: Path) -> None:
    assert has_completed(RunLayout(tmp_path), "trainer", run=RunIdentity(), max_steps=None) is False
