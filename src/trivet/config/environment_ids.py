"""Takes an environment's id apart as people write it: `my-env` or `owner/my-env`, with or without `@0.1.2` or `==0.1.2`."""

import re
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

_ID = re.compile(r"(?P<package>(?:[\w.-]+/)?[\w.-]+)(?:(?:@|==)(?P<version>[^@=]+))?")
_ANY_VERSION = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentId:
    """The parts of an id."""

    package: str
    """The name of the package, with its owner where the id has one."""
    version: Version | None = None
    """The version that must be installed; None for any, which `@latest` means too."""

    @property
    def name(self) -> str:
        """The name of the package alone."""
        return self.package.rpartition("/")[2]


def parse_environment_id(text: str) -> EnvironmentId:
    """Return the parts of an id.

    Raises:
        ValueError: it is no name of a package, or its version is none.
    """
    found = _ID.fullmatch(text)
    if found is None:
        raise ValueError(
            "is no name of an environment; write my-env, owner/my-env, and with a version my-env@0.1.2 or my-env==0.1.2"
        )
    version = found["version"]
    try:
        return EnvironmentId(package=found["package"], version=None if version in (None, _ANY_VERSION) else Version(version))
    except InvalidVersion:
        raise ValueError(f"asks for version {version!r}, which is none; write it like {found['package']}@0.1.2") from None
