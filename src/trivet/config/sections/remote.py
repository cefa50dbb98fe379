"""Types and checks that sections for jobs on other machines share: paths there, environment variables, and what may be shown."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

from trivet.config.masking import names_secret

Label = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""A name as DNS has them (RFC 1035): a small letter, then small letters, digits and dashes, 63 characters at most."""
JobName = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")]
"""The same in 40 characters: pods are called `NAME-inference-4095-0-abcde`, and 63 are the most for that."""
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Name of an environment variable."""


def _require_absolute(path: Path) -> Path:
    if not path.is_absolute() or ".." in path.parts:
        raise ValueError("must be an absolute path without ..: it is one on the machines of the job")
    return path


RemotePath = Annotated[Path, AfterValidator(_require_absolute)]


def require_no_secrets(env: Iterable[str], *, given: Iterable[str], instead: str) -> None:
    """Refuse variables that may be secret, and those that are given as secrets too.

    Args:
        env: names of variables whose values are written into a file that others read.
        given: names of variables whose values are not.
        instead: what to write for the name `{}`.

    Raises:
        ValueError: there are such variables.
    """
    if both := sorted(set(env) & set(given)):
        raise ValueError(f"{', '.join(both)}: in env and among the secrets; keep one of each")
    if secret := sorted(name for name in env if names_secret(name)):
        raise ValueError(
            f"{', '.join(secret)} in env may be secret, and the file would show it; write in its place: {instead.format(secret[0])}"
        )
