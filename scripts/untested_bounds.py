"""Names the lower bounds of pyproject.toml that are not what is installed here. `scripts/lowest_versions.sh` runs it.

After an installation of the lowest versions every bound should be installed. Where another package's requirement rules the
bound out, nobody can test it, so the file promises too much. Prints the lowest versions; exits with 1 when a bound is untested.
"""

import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

_PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lower_bounds(lines: Iterable[str]) -> dict[str, str]:
    """Return the version after `>=` by package, for requirements that have one."""
    return {
        requirement.name: specifier.version
        for requirement in map(Requirement, lines)
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }


def untested_bounds(bounds: Mapping[str, str], installed: Mapping[str, str]) -> list[str]:
    """Return a line for each bound that is not the installed version."""
    return [
        f"{name}>={bound}: the lowest version that can be installed is {installed[name]}; raise the bound to it"
        for name, bound in bounds.items()
        if Version(installed[name]) != Version(bound)
    ]


def main() -> int:
    """Run the program; return its exit code."""
    content = tomllib.loads(_PYPROJECT.read_text())
    bounds = lower_bounds([*content["project"]["dependencies"], *content["dependency-groups"]["dev"]])
    installed = {name: metadata.version(name) for name in bounds}
    print("lowest:", *(f"{name} {version}" for name, version in installed.items()))
    problems = untested_bounds(bounds, installed)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
