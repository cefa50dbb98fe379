"""Loads an environment with the adapter for the installed verifiers API, and explains why an environment cannot be loaded.

There are two adapters: `apis.v0` for verifiers 0.3, and `apis.v1` for verifiers 0.4 and newer. The release in verifiers' metadata
decides. Only the adapters import verifiers, so this module can be imported without it. Nothing here may import pydantic, httpx,
torch or transformers: a worker's interpreter has only msgspec, numpy, and the dependencies of its environment.
"""

import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import traceback
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from trivet.config.masking import hide_values, mask_table
from trivet.environments.apis.groups import StageBoard
from trivet.errors import EnvironmentLoadError
from trivet.process.imports import file_of
from trivet.shown_text import printable
from trivet.wire.groups import EnvironmentInfo, Example, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.workers import HostSettings

LIBRARY = "verifiers"
"""The library that environments are written with. Environments require it; trivet does not."""
AGENT = "agent"
"""The id of an environment that is a program of the user's, which owns its loop (`apis.agents`). It needs no package."""
LOADER = "load_environment"
"""The function of an environment's module that verifiers' v0 API calls."""
FIRST_V0_RELEASE, FIRST_V1_RELEASE = (0, 3), (0, 4)
"""Releases of verifiers, major and minor: the oldest that trivet can use, by the v0 API, and the first that it uses by the v1
API."""

_TRACEBACK_LINES = 8
"""The last lines of a traceback that a message shows."""


class EnvironmentHost(Protocol):
    """A loaded environment with its data sets and its clients of the inference servers. `V0Host` and `V1Host` implement it."""

    api: str
    """The verifiers API that the environment is written for: `v0` or `v1`."""
    info: EnvironmentInfo
    """Describes the data sets."""

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Play and score the rollouts of a group, or only score them if they are recorded. Return the scored rollouts.

        Raises:
            RolloutFailed: a rollout could not be completed or scored, or a recorded rollout is not of today's example.
        """
        ...

    def example(self, *, split: Split, example_id: int) -> Example:
        """Return an example of the data."""
        ...

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Run services that groups need, such as tool servers of the environment. At the end, close them and the clients."""
        ...


def load_host(settings: HostSettings, *, environ: Mapping[str, str], stages: StageBoard | None = None) -> EnvironmentHost:
    """Load the environment that `settings` name. Must be called on the main thread, because verifiers installs signal handlers.

    Args:
        environ: the environment variables, with the keys of the servers.
        stages: records the stage of each group.

    Raises:
        EnvironmentLoadError: verifiers or the package is not installed, or the package's own code raised.
    """
    if settings.env_id == AGENT:
        from trivet.environments.apis.agents.host import load
    elif require_release(settings.env_id) >= FIRST_V1_RELEASE:
        from trivet.environments.apis.v1.load import load
    else:
        from trivet.environments.apis.v0.load import load
    return load(settings, environ=environ, stages=stages or StageBoard())


def require_release(env_id: str) -> tuple[int, int]:
    """Return the installed release of verifiers, major and minor.

    Raises:
        EnvironmentLoadError: verifiers is not installed, or its release is older than `FIRST_V0_RELEASE`.
    """
    try:
        version = importlib.metadata.version(LIBRARY)
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentLoadError(
            f"env.id = {env_id!r} needs verifiers, which is not installed where it runs; install the environment with: "
            f"uv run trivet env install {env_id}"
        ) from None
    match = re.match(r"(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    if release < FIRST_V0_RELEASE:
        raise EnvironmentLoadError(
            f"env.id = {env_id!r} runs with verifiers {version}, which trivet cannot run; install verifiers 0.3 for an "
            "environment of the v0 API (load_environment), or 0.4 or newer for one of the v1 API"
        )
    return release


def find_problem(module: str) -> str:
    """Import the module of an environment; return in one line why it is not usable, or "" when it is.

    For verifiers' v0 API the module must have `load_environment`; for the v1 API its `__all__` must export a taskset or an
    environment.
    """
    try:
        imported = importlib.import_module(module)
        release = require_release(module.replace("_", "-"))
    except EnvironmentLoadError as exc:
        return str(exc)
    except (Exception, SystemExit) as exc:  # noqa: BLE001  # user code may raise anything: it is reported with the environment's name
        message = " ".join(str(exc).split())
        return f"{type(exc).__name__}: {message}" if message else type(exc).__name__
    has_loader = callable(getattr(imported, LOADER, None))
    if release < FIRST_V1_RELEASE:
        return "" if has_loader else f"the module {module} has no {LOADER}, by which environments are loaded"
    library = importlib.import_module("verifiers.v1")
    bases = (library.Taskset, library.Env)
    exported = [getattr(imported, name, None) for name in getattr(imported, "__all__", ())]
    if any(inspect.isclass(value) and issubclass(value, bases) and value not in bases for value in exported):
        return ""
    if has_loader:
        return f"the module {module} has {LOADER}, which is of the v0 API; verifiers here has the v1 API: require verifiers<0.4"
    return f"the module {module} exports no Taskset or Env through __all__, by which environments of the v1 API are loaded"


def require_installed(env_id: str, *, environments_dir: Path = Path("environments")) -> None:
    """Check without an import that the module of `env_id` can be found. An id may also name a function in a file.

    Args:
        environments_dir: the directory of a checkout's own environments.

    Raises:
        EnvironmentLoadError: it cannot be found. The message names an environment with a similar name, or the command that installs
            it.
    """
    if (file := file_of(env_id)) is not None:
        if not file.is_file():
            raise EnvironmentLoadError(f"env.id = {env_id!r}: there is no file {file}")
        return
    if env_id == AGENT:
        return
    package = env_id.split("/")[-1]
    module = package.replace("-", "_")
    if importlib.util.find_spec(module) is not None:
        return
    if (environments_dir / module).is_dir():
        raise EnvironmentLoadError(
            f"env.id = {env_id!r} is not installed; install it with: uv run trivet env install {package}"
        )
    in_checkout = sorted(path.parent.name.replace("_", "-") for path in environments_dir.glob("*/pyproject.toml"))
    installed = [
        distribution.name.replace("_", "-")
        for distribution in importlib.metadata.distributions()
        if any(requirement.startswith(LIBRARY) for requirement in distribution.requires or ())
    ]
    if nearest := difflib.get_close_matches(package.replace("_", "-"), [*in_checkout, *installed], n=1, cutoff=0.8):
        raise EnvironmentLoadError(f"env.id = {env_id!r} is not installed (no module {module!r}); did you mean {nearest[0]!r}?")
    raise EnvironmentLoadError(
        f"env.id = {env_id!r} is not installed (no module {module!r}). If you trust it, install it with: "
        f"uv run trivet env install {env_id}{'' if '/' in env_id else ' --from-index'}. "
        f"Environments of this checkout: {', '.join(in_checkout) or 'none'}"
    )


def make_load_error(settings: HostSettings, error: BaseException, *, called: str) -> EnvironmentLoadError:
    """Return an error which reports that user code raised `error` while an environment was loaded.

    The caller must raise it from `error`, so that `traceback_tail` finds the place in the user's code.

    Args:
        called: what was called, for the message, such as `load_environment`.
    """
    cause = error.__cause__ or error
    message = (
        f"environment {settings.name!r}: {called} of {settings.env_id!r} with args {mask_table(settings.args)} raised "
        f"{type(cause).__name__}: {cause}"
    )
    if isinstance(cause, TypeError):
        message += "; check the args against its signature"
    return EnvironmentLoadError(printable(hide_values(message, settings.args)))


def traceback_tail(error: EnvironmentLoadError, args: Mapping[str, Any]) -> str:
    """Return the last lines of the traceback of the innermost cause of `error`, with the secrets in `args` hidden.

    Return "" for an error without a cause.
    """
    cause = error.__cause__
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is None:
        return ""
    text = printable(hide_values("".join(traceback.format_exception(cause)), args))
    return "\n  " + "\n  ".join(text.rstrip().splitlines()[-_TRACEBACK_LINES:])
