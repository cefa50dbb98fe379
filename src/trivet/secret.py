"""Keeps the run's secret. Only a process that has it may change the run.

The secret is in a file that its owner alone may read, never in a configuration, an argument or a log. The launcher creates the file
and passes its path to the roles in an environment variable. A resumed run keeps the secret.
"""

import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from trivet.config.layout import SECRET_FILE, RunLayout
from trivet.errors import ConfigError
from trivet.storage.durable import write_first

_NUM_BYTES = 32
_GROUP_AND_OTHERS = 0o077
"""The permission bits of everyone but the owner."""


class RunSecret:
    """The 32 random bytes of a run. The class has no repr of its own, so nothing prints the bytes by accident."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @property
    def token(self) -> str:
        """The bearer token of admin routes: the 64 hexadecimal digits of the file."""
        return self._key.hex()

    def derive(self, purpose: str) -> bytes:
        """Return a key of 32 bytes for one purpose.

        Neither the secret nor another purpose's key can be computed from it.
        """
        return hashlib.blake2b(purpose.encode(), key=self._key, digest_size=_NUM_BYTES).digest()


def share_secret(layout: RunLayout, *, environ: Mapping[str, str]) -> dict[str, str]:
    """Create the run's secret if there is none, and return the environment variable that names its file to the roles.

    The path is absolute, because a role may run in another directory.
    """
    find_secret(layout, environ=environ)
    return {SECRET_FILE: str(secret_file(layout, environ=environ))}


def secret_file(layout: RunLayout, *, environ: Mapping[str, str]) -> Path:
    """Return the absolute path of the secret's file: the one that `environ` names, else the one in the output directory."""
    return Path(environ.get(SECRET_FILE) or layout.secret).absolute()


def find_secret(layout: RunLayout, *, environ: Mapping[str, str]) -> RunSecret:
    """Return the secret in `secret_file`. A missing file is created in the output directory; elsewhere it is a ConfigError."""
    file = secret_file(layout, environ=environ)
    return make_secret(file) if file == layout.secret.absolute() else read_secret(file)


def make_secret(file: Path) -> RunSecret:
    """Write a new secret if `file` does not exist, and return the secret in it. Several processes may call this at once."""
    try:
        write_first(file, f"{secrets.token_hex(_NUM_BYTES)}\n".encode(), is_private=True)
    except OSError as exc:
        raise ConfigError(f"output_dir {str(file.parent)!r} cannot be written: {exc.strerror}; choose another") from exc
    return read_secret(file)


def read_secret(file: Path) -> RunSecret:
    """Read the secret in `file`. Raises a ConfigError if the file is missing, holds no secret, or other users may read it."""
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(2 * _NUM_BYTES + 2)
    except OSError as exc:
        raise ConfigError(
            f"the run's secret cannot be read from {file}: {exc.strerror}; name the file of the run with {SECRET_FILE}"
        ) from exc
    if mode & _GROUP_AND_OTHERS:
        raise ConfigError(f"other users may read the run's secret in {file}: chmod 600 it")
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != _NUM_BYTES:
        raise ConfigError(f"{file} does not hold a run's secret, which is {2 * _NUM_BYTES} hexadecimal digits")
    return RunSecret(key)
