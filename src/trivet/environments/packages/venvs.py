"""Keeps the virtual environments that `trivet env install` makes for environments: where they are, and what is in each.

A directory per virtual environment holds `record.json` and the virtual environment itself, in a directory that the record names. An
installation builds a new one beside it and then replaces the record, so one that fails changes nothing. The one before stays until
the next installation: a run that was started with it may have to restart its workers.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from packaging.utils import canonicalize_name

from trivet.config.layout import VENVS
from trivet.errors import ConfigError
from trivet.process.lock import FileLock
from trivet.storage.durable import DECODE_ERRORS, write_json_atomically

_RECORD = "record.json"
_KEPT = 2
"""Virtual environments that stay of one name: the one that the record names, and the one before."""


class InstalledEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """An environment package in a virtual environment."""

    name: str
    version: str
    module: str
    """The module to import; its name with dashes is the `id` in a configuration."""
    source: list[str]
    """What the installer was told: a requirement with its version, a wheel, or `-e` and a directory."""
    index: str = ""
    """The index that the installer was told besides; empty for none."""
    origin: str
    """The kind and the location of the source, for people."""

    @property
    def env_id(self) -> str:
        """The `id` of the environment in a configuration."""
        return self.module.replace("_", "-")


class VenvRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of record.json."""

    name: str
    directory: str
    """The virtual environment, below that of the record."""
    api: str
    """Generation of the verifiers API: `v0` or `v1`."""
    python: str
    verifiers: str
    worker: str
    """Version of trivet-worker."""
    protocol: int
    """The version of the protocol that its workers speak."""
    environments: list[InstalledEnvironment]

    def find(self, env_id: str) -> InstalledEnvironment | None:
        """Return the environment that a configuration calls `env_id`, None when it is not here."""
        wanted = canonicalize_name(env_id.rpartition("/")[2])
        return next((env for env in self.environments if wanted in (canonicalize_name(env.name), env.env_id)), None)

    def describe(self) -> str:
        """Return the name, the versions and the environments in one line."""
        environments = ", ".join(f"{env.env_id} {env.version}" for env in self.environments)
        return f"{self.name} (Python {self.python}, verifiers {self.verifiers}): {environments}"


class VenvStore:
    """The virtual environments of one installation of trivet.

    >>> store = VenvStore(find_home(os.environ))
    >>> store.python(store.records()["v0"])
    PosixPath('.trivet/venvs/v0/1/bin/python')
    """

    def __init__(self, home: Path) -> None:
        self.home = home

    def records(self) -> dict[str, VenvRecord]:
        """Return what was installed, by the name of the virtual environment.

        Raises:
            ConfigError: a record cannot be read.
        """
        found: dict[str, VenvRecord] = {}
        for path in sorted(self.home.glob(f"*/{_RECORD}")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=VenvRecord)
            except DECODE_ERRORS as exc:
                raise ConfigError(
                    f"{path} cannot be read: {exc}; remove {path.parent}, and install its environments again"
                ) from exc
            found[record.name] = record
        return found

    def python(self, record: VenvRecord) -> Path:
        """Return the interpreter of a virtual environment."""
        return self.home / record.name / record.directory / "bin" / "python"

    def hold(self) -> FileLock:
        """Return the lock of whoever changes a virtual environment: two installations at once would each lose the other's."""
        self.home.mkdir(parents=True, exist_ok=True)
        ignored = self.home.parent / ".gitignore"
        if self.home.parent.name == ".trivet" and not ignored.exists():
            ignored.write_text("*\n")
        return FileLock(self.home / ".lock", what=f"the directory of virtual environments {str(self.home)!r}")

    def new_directory(self, name: str) -> Path:
        """Return the path of the next virtual environment `name`. What a broken installation left is removed; for the holder."""
        root = self.home / name
        record = self.records().get(name)
        current = int(record.directory) if record is not None else 0
        for path in root.glob("[0-9]*"):
            if not current - _KEPT + 1 < int(path.name) <= current:
                shutil.rmtree(path)
        return root / str(current + 1)

    def commit(self, record: VenvRecord) -> None:
        """Make the virtual environment that `record` describes the one of its name."""
        write_json_atomically(self.home / record.name / _RECORD, record)

    def remove(self, name: str) -> None:
        """Remove a virtual environment; its record goes first. For the holder."""
        (self.home / name / _RECORD).unlink(missing_ok=True)
        shutil.rmtree(self.home / name, ignore_errors=True)


def find_home(environ: Mapping[str, str] = os.environ, *, prefix: str = sys.prefix) -> Path:
    """Return the directory of virtual environments: of the project that trivet is installed in, or else of this user.

    A checkout and a workspace have theirs, in `.trivet/venvs` beside the `.venv` that runs this: another project's environments are
    not mixed in, the working directory does not matter, and making `.venv` anew loses nothing. The variable `TRIVET_VENVS` names
    another directory.
    """
    if named := environ.get(VENVS):
        return Path(named).absolute()
    project = Path(prefix).parent
    if (project / "pyproject.toml").is_file():
        return project / ".trivet" / "venvs"
    return Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "trivet" / "venvs"
