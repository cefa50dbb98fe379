"""Keeps the run's secret: whoever has it may change the run, nobody else can.

It is in a file that its owner alone may read, never in a configuration, an argument or a log. The launcher makes it and names
the file to its roles by an environment variable; a resumed run keeps it.
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
_OTHERS = 0o077
"""Permissions of everyone but the owner."""


class RunSecret:
    """32 random bytes, which nothing prints by accident."""

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
    """Return the variable by which roles find the secret that `find_secret` finds, wherever they run; it is made if need be."""
    find_secret(layout, environ=environ)
    return {SECRET_FILE: str(secret_file(layout, environ=environ))}


def secret_file(layout: RunLayout, *, environ: Mapping[str, str]) -> Path:
    """Return the file that `environ` names, else that of the output directory; absolute."""
    return Path(environ.get(SECRET_FILE) or layout.secret).absolute()


def find_secret(layout: RunLayout, *, environ: Mapping[str, str]) -> RunSecret:
    """Return the secret in the file that `environ` names, else that of the output directory, which is made when it has none."""
    named = secret_file(layout, environ=environ)
    return make_secret(named) if named == layout.secret.absolute() else read_secret(named)


def make_secret(file: Path) -> RunSecret:
    """Write a new secret unless the file is there; returns what it holds. Several processes may call it at one moment."""
    try:
        write_first(file, f"{secrets.token_hex(_NUM_BYTES)}\n".encode(), is_private=True)
    except OSError as exc:
        raise ConfigError(f"output_dir {str(file.parent)!r} cannot be written: {exc.strerror}; choose another") from exc
    return read_secret(file)


def read_secret(file: Path) -> RunSecret:
    """Read the secret in `file`; a ConfigError if it is missing, is not a secret, or other users may read it."""
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(2 * _NUM_BYTES + 2)
    except OSError as exc:
        raise ConfigError(
            f"the run's secret cannot be read from {file}: {exc.strerror}; name the file of the run with {SECRET_FILE}"
        ) from exc
    if mode & _OTHERS:
        raise ConfigError(f"other users may read the run's secret in {file}: chmod 600 it")
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != _NUM_BYTES:
        raise ConfigError(f"{file} does not hold a run's secret, which is {2 * _NUM_BYTES} hexadecimal digits")
    return RunSecret(key)
