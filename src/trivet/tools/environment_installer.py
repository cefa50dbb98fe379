"""Installs environments into virtual environments of their own, beside the one that trivet runs in, which never changes.

Environments of one generation of the verifiers API share a virtual environment, in which each installed package keeps its version.
A package that does not fit gets one of its own. Every installation builds a new virtual environment and then replaces the record of
the old one: `environments.packages.venvs`.
"""

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from packaging.utils import canonicalize_name

from trivet.dependencies import InstalledPackages
from trivet.environments.packages.interpreters import WORKER_SOURCE
from trivet.environments.packages.venvs import InstalledEnvironment, VenvRecord, VenvStore
from trivet.errors import ConfigError, DependencyError
from trivet.tools.environment_source import InspectedPackage, PackageSource, inspect
from trivet.tools.installer import choose_installer, describe_conflicts, find_conflicts
from trivet.wire.workers import PROTOCOL

SHARED_RELEASES = {"v0": "verifiers>=0.3.1,<0.4", "v1": "verifiers>=0.4,<0.5"}
"""Constraint of the virtual environment that a generation shares: its newest release. A package that pins an older one has its
own."""
_WORKER = "trivet-worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A virtual environment to build."""

    name: str
    sources: tuple[PackageSource, ...]
    constraints: tuple[str, ...]
    """Requirements that hold for whatever is installed."""


def install(source: PackageSource, *, store: VenvStore, venv: str | None) -> VenvRecord:
    """Install a package and return the record of the virtual environment that has it now.

    Args:
        venv: the name of the virtual environment; None takes the one of the package's generation, or one of its own.

    Raises:
        ConfigError: the package cannot be fetched or built, or is no environment.
        DependencyError: what it needs cannot be installed together. What was installed before stays.
    """
    inspected = inspect(source, installer=choose_installer())
    with store.hold():
        name = venv or inspected.api
        try:
            return _install_into(name, source, inspected, store, is_shared=venv is None)
        except DependencyError as exc:
            if venv is not None:
                raise
            own = canonicalize_name(inspected.environment.name)
            print(f"{exc}\nit gets a virtual environment of its own: {own}")
            record = _install_into(own, source, inspected, store, is_shared=False)
            _drop(own, inspected, store)
            return record


def remove(env_id: str, *, store: VenvStore) -> VenvRecord | None:
    """Remove an environment; return the record of what is left of its virtual environment, None where nothing is.

    Raises:
        ConfigError: no virtual environment has it.
    """
    with store.hold():
        records = store.records()
        record = next((record for record in records.values() if record.find(env_id) is not None), None)
        if record is None:
            there = ", ".join(env.env_id for each in records.values() for env in each.environments)
            raise ConfigError(f"{env_id} is in no virtual environment of {store.home}; environments there: {there or 'none'}")
        gone = record.find(env_id)
        left = [env for env in record.environments if env is not gone]
        if not left:
            store.remove(record.name)
            return None
        plan = _Plan(
            name=record.name,
            sources=tuple(PackageSource(words=tuple(env.source), index=env.index) for env in left),
            constraints=tuple(_pins(store, record)),
        )
        return _build(plan, left, record.api, store)


def _install_into(
    name: str, source: PackageSource, inspected: InspectedPackage, store: VenvStore, *, is_shared: bool
) -> VenvRecord:
    record = store.records().get(name)
    package = inspected.environment
    if record is not None and record.api != inspected.api:
        raise DependencyError(
            f"{package.name} is written for the {inspected.api} API of verifiers, and virtual environment {name!r} has {record.api}"
        )
    others = [] if record is None else [env for env in record.environments if env.name != package.name]
    pins = _pins(store, record, spared=package.name) if record is not None and others else []
    plan = _Plan(
        name=name,
        sources=(source, *(PackageSource(words=tuple(env.source), index=env.index) for env in others)),
        constraints=(*pins, *([SHARED_RELEASES[inspected.api]] if is_shared else [])),
    )
    words = list(source.words)
    if words[0] != "-e" and not words[0].endswith(".whl"):
        words = [f"{package.name}=={package.version}"]
    origin = package.origin.describe(base=Path.cwd())
    entry = InstalledEnvironment(
        name=package.name,
        version=package.version,
        module=package.module,
        source=words,
        index=source.index,
        origin=f"editable {words[1]}" if words[0] == "-e" else f"hub {source.index}" if source.index else origin,
    )
    return _build(plan, [entry, *others], inspected.api, store)


def _build(plan: _Plan, environments: Sequence[InstalledEnvironment], api: str, store: VenvStore) -> VenvRecord:
    directory = store.new_directory(plan.name)
    try:
        site = _fill(directory, plan)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):  # it holds what was installed before
            directory.parent.rmdir()
        raise
    versions = {name: package.version for name, package in InstalledPackages([str(site)]).find_all().items()}
    record = VenvRecord(
        name=plan.name,
        directory=directory.name,
        api=api,
        python=platform.python_version(),
        verifiers=versions.get("verifiers", ""),
        worker=versions[_WORKER],
        protocol=PROTOCOL,
        environments=sorted(environments, key=lambda env: env.name),
    )
    store.commit(record)
    return record


def _fill(directory: Path, plan: _Plan) -> Path:
    """Make a virtual environment and install into it; return its directory of packages."""
    _make_venv(directory)
    installer = choose_installer(str(directory / "bin" / "python"))
    with tempfile.NamedTemporaryFile("w", prefix="trivet-constraints-", suffix=".txt") as constraints:
        constraints.write("".join(f"{line}\n" for line in plan.constraints))
        constraints.flush()
        indexes = [word for source in plan.sources for word in source.index_words]
        words = [word for source in plan.sources for word in source.words]
        done = installer.run([*indexes, "--constraint", constraints.name, str(WORKER_SOURCE), *words])
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()
        reason = describe_conflicts(find_conflicts(said, plan.constraints), constraints=plan.constraints) or said
        raise DependencyError(
            f"{plan.sources[0].describe()} cannot be installed into virtual environment {plan.name!r}: {reason}"
        )
    print(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "installed")
    [site] = directory.glob("lib/python*/site-packages")
    return site


def _make_venv(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    uv = shutil.which("uv")
    command = [uv, "venv", "--quiet", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
    done = subprocess.run([*command, str(directory)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise ConfigError(f"no virtual environment can be made in {directory}: {(done.stderr or done.stdout).strip()}")


def _pins(store: VenvStore, record: VenvRecord, *, spared: str = "") -> list[str]:
    """Return requirements that keep the version of every package of a virtual environment but `spared` and the worker."""
    sites = (store.python(record).parents[1]).glob("lib/python*/site-packages")
    packages = InstalledPackages([str(site) for site in sites]).find_all()
    own = {canonicalize_name(name) for name in (spared, _WORKER)}
    return [f"{name}=={package.version}" for name, package in packages.items() if name not in own]


def _drop(name: str, inspected: InspectedPackage, store: VenvStore) -> None:
    """Take the package that moved to virtual environment `name` out of the record of every other."""
    for record in store.records().values():
        if record.name != name and (env := record.find(inspected.environment.name)) is not None:
            left = [each for each in record.environments if each is not env]
            store.commit(msgspec.structs.replace(record, environments=left))
