"""The commands of uv and pip, and what their messages say of requirements that contradict each other."""

from pathlib import Path

import pytest

from trivet.errors import ConfigError
from trivet.tools.installer import Conflict, choose_installer, describe_conflicts, find_conflicts


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param(
            "error: No solution found when resolving dependencies\n  cause: Because bad-env==0.1.0 depends on msgspec==0.19.0 and "
            "msgspec==0.22.0, we can conclude that bad-env==0.1.0 cannot be used.\n         And because only bad-env==0.1.0 is "
            "available and you require bad-env, we can conclude that your requirements are unsatisfiable.",
            [Conflict(package="bad-env", requirement="msgspec==0.19.0", name="msgspec")],
            id="uv",
        ),
        pytest.param(
            "No solution found:\n  ╰─▶ Because all versions of bad-env depend on\n      msgspec<0.20 and "
            "msgspec==0.22.0, we can conclude …",
            [Conflict(package="bad-env", requirement="msgspec<0.20", name="msgspec")],
            id="uv wraps, all versions",
        ),
        pytest.param(
            "ERROR: Cannot install bad-env==0.1.0 because these package versions have conflicting dependencies.\n\nThe conflict is "
            "caused by:\n    bad-env 0.1.0 depends on msgspec==0.19.0\n    The user requested (constraint) msgspec==0.22.0\n",
            [Conflict(package="bad-env", requirement="msgspec==0.19.0", name="msgspec")],
            id="pip",
        ),
        pytest.param(
            "    a 1.0 depends on Msg_Spec<0.20,>=0.19\n    b[x] 2.0 depends on torch==2.12; python_version > '3'",
            [
                Conflict(package="a", requirement="Msg_Spec<0.20,>=0.19", name="msg-spec"),
                Conflict(package="b", requirement="torch==2.12", name="torch"),
            ],
            id="pip, two packages, spelled otherwise",
        ),
        pytest.param("Because torch==2.13.0+cpu depends on msgspec>=0.20 and …", [], id="one constrained package on another"),
        pytest.param("Because bad-env==0.1.0 depends on other==1 and other==2, we …", [], id="not what trivet runs on"),
        pytest.param("error: bad-env was not found in the package registry", [], id="another failure"),
    ],
)
def test_conflicts_are_read_from_the_message_of_the_tool(message: str, expected: list[Conflict]) -> None:
    assert find_conflicts(message, ["msgspec==0.20", "msg-spec==1", "torch==2"]) == expected


@pytest.mark.parametrize(
    ("pin", "conflicts"), [("0.3.1", []), ("0.2.0", ["verifiers==0.2.0"])], ids=["inside the constraint", "outside of it"]
)
def test_a_pin_that_agrees_with_the_constraint_is_no_conflict(pin: str, conflicts: list[str]) -> None:
    message = f"Because env==1.0 depends on verifiers=={pin} and msgspec==0.19.0, we can conclude …"
    found = find_conflicts(message, ["verifiers>=0.3.1,<0.4"])
    assert [each.requirement for each in found] == conflicts


def test_a_conflict_is_described_with_what_holds_instead() -> None:
    conflict = Conflict(package="env", requirement="deep<2", name="deep")
    assert (
        describe_conflicts([conflict], constraints=["Deep==2.5", "other==1"]) == "env requires deep<2, and it holds Deep==2.5"
    )
    assert describe_conflicts([], constraints=["deep==2.5"]) == ""


def test_a_python_without_an_installer_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="neither uv on PATH nor pip"):
        choose_installer(str(python))
