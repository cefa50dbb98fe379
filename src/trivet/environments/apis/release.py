"""Reads which release of verifiers is installed, from its metadata: verifiers itself takes seconds to import."""

import importlib.metadata
import re

from trivet.errors import EnvironmentLoadError

OLDEST_RELEASE = (0, 1, 2)
"""Earlier ones have no `load_environment`, block the event loop while the model answers, and keep no answers."""

FIRST_WITH_V1_ALONE = (0, 4, 0)
"""From here on environments are run by the v1 API, before by the v0 API."""

_NUMBERS = re.compile(r"(\d+)\.(\d+)\.(\d+)")


def verifiers_release() -> tuple[int, int, int] | None:
    """Return the installed release, without the suffix of a post release; None when verifiers is not installed."""
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        return None
    return parse_release(version)


def parse_release(version: str) -> tuple[int, int, int]:
    """Return the three numbers of a version such as `0.1.9.post3`."""
    found = _NUMBERS.match(version)
    if found is None:
        raise EnvironmentLoadError(f"the installed verifiers has the version {version!r}, which is not a release such as 0.3.1")
    major, minor, patch = found.groups()
    return int(major), int(minor), int(patch)


def require_release(env_id: str) -> tuple[int, int, int]:
    """Return the installed release.

    Raises:
        EnvironmentLoadError: verifiers is not installed, or is older than any that can be run.
    """
    release = verifiers_release()
    oldest = ".".join(map(str, OLDEST_RELEASE))
    if release is None:
        raise EnvironmentLoadError(
            f"env.id = {env_id!r} needs verifiers, which is not installed where it runs; install the environment with: "
            f"uv run trivet env install {env_id}"
        )
    if release < OLDEST_RELEASE:
        found = ".".join(map(str, release))
        raise EnvironmentLoadError(
            f"env.id = {env_id!r} runs with verifiers {found}, which trivet cannot run; allow verifiers {oldest} or newer"
        )
    return release
