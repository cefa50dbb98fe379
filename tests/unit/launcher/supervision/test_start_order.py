"""Which role may start, as a table over cores, roles that start, and the check of the environments."""

from pathlib import Path

import pytest

from support.fake_roles import FakeChild, FakeEnvironments, make_spec, write_report
from trivet.config.layout import RunLayout
from trivet.errors import EnvironmentLoadError
from trivet.launcher.reports import read_reports
from trivet.launcher.supervision.role_processes import RoleProcess
from trivet.launcher.supervision.start_order import StartOrder


def role(layout: RunLayout, name: str, *, waits_for: str = "") -> RoleProcess:
    """Return a role that was started at second 100."""
    write_report(layout, name, waits_for=waits_for)
    started = RoleProcess(FakeChild(spec=make_spec(layout, name), pid=1), now=100.0)
    started.reports = read_reports(started.child.spec.reports)
    return started


@pytest.mark.parametrize(
    ("name", "num_cpus", "started", "answering", "is_loaded", "expected"),
    [
        ("inference", 1, [], [], False, True),
        ("trainer", 2, ["inference"], [], False, False),
        ("trainer", 2, ["inference"], [], True, True),
        ("trainer", 2, ["inference"], ["inference"], False, True),
        ("trainer", 3, ["inference"], [], False, True),
        ("orchestrator", 64, ["inference", "trainer"], [], False, False),
        ("orchestrator", 2, ["inference", "trainer"], [], True, False),
        ("orchestrator", 2, ["inference", "trainer"], ["inference"], True, True),
        ("orchestrator", 3, ["inference", "trainer"], [], True, True),
    ],
)
def test_no_more_roles_start_than_there_are_cores(
    tmp_path: Path, name: str, num_cpus: int, started: list[str], answering: list[str], is_loaded: bool, expected: bool
) -> None:
    order = StartOrder(FakeEnvironments(is_over=is_loaded), num_cpus=num_cpus)
    roles = [role(RunLayout(tmp_path), each) for each in started]
    assert order.may_start(name, started=roles, answering=answering, now=101.0) is expected


@pytest.mark.parametrize(("answering", "expected"), [([], False), (["inference"], True)])
def test_a_role_waits_for_the_server_on_its_gpu_to_answer(tmp_path: Path, answering: list[str], expected: bool) -> None:
    order = StartOrder(FakeEnvironments(), num_cpus=64)
    started = [role(RunLayout(tmp_path), "inference")]
    assert order.may_start("trainer", started=started, answering=answering, after=["inference"], now=1000.0) is expected


def test_a_role_that_waits_for_another_is_up(tmp_path: Path) -> None:
    order = StartOrder(FakeEnvironments(), num_cpus=1)
    layout = RunLayout(tmp_path)
    assert order.may_start("orchestrator", started=[role(layout, "trainer", waits_for="orchestrator")], answering=[], now=101.0)
    assert not order.may_start("orchestrator", started=[role(layout, "trainer")], answering=[], now=101.0)


def test_a_role_that_says_nothing_is_up_after_half_a_minute(tmp_path: Path) -> None:
    order = StartOrder(FakeEnvironments(), num_cpus=1)
    silent = role(RunLayout(tmp_path), "trainer")
    assert not order.may_start("orchestrator", started=[silent], answering=[], now=130.0)
    assert order.may_start("orchestrator", started=[silent], answering=[], now=130.5)


def test_environments_that_cannot_be_loaded_are_said_once_they_are_over() -> None:
    environments = FakeEnvironments(is_over=False, error=EnvironmentLoadError("no data"))
    order = StartOrder(environments, num_cpus=2)
    assert not order.may_start("orchestrator", started=[], answering=[], now=1.0)
    environments.is_over = True
    with pytest.raises(EnvironmentLoadError, match="no data"):
        order.may_start("orchestrator", started=[], answering=[], now=2.0)
