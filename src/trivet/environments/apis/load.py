"""Loads an environment with the adapter of the verifiers API that is installed, and says what is wrong when it cannot be loaded.

The release of verifiers, read from its metadata, decides: 0.3 has the v0 API, 0.4 and newer the v1 API. Each adapter imports
verifiers in modules of its own, so this one can be imported without it. Nothing here may import pydantic, httpx, torch or
transformers itself: an environment's process has msgspec, numpy, and what its environment brings.
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
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.workers import HostSettings

LIBRARY = "verifiers"
"""The library that environments are written with. They require it; trivet does not."""
LOADER = "load_environment"
"""The function of an environment's module that verifiers' v0 API calls."""
FIRST_OF_V0, FIRST_OF_V1 = (0, 3), (0, 4)
"""Releases of verifiers, major and minor: the oldest that is run, by the v0 API, and the first that is run by the v1 API."""

_TRACEBACK_LINES = 8


class EnvironmentHost(Protocol):
    """A loaded environment, its data sets, and its clients of the servers. Adapters: `V0Host` and `V1Host`."""

    name: str
    """The environment's name in the configuration."""
    api: str
    """Generation of the verifiers API that the environment is written for: `v0` or `v1`."""
    info: EnvironmentInfo

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group, or score a recorded one, and return its scored rollouts.

        Raises:
            RolloutFailed: a rollout could not be completed or scored, or a recorded one is not of today's example.
        """
        ...

    def prompt(self, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """Return the messages that an example starts with."""
        ...

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Keep up what groups need, such as tool servers of the environment. At the end, close it and the clients of servers."""
        ...


def load_host(settings: HostSettings, *, environ: Mapping[str, str], stages: StageBoard | None = None) -> EnvironmentHost:
    """Load the environment that `settings` name. Call it on the main thread: verifiers installs signal handlers.

    Args:
        environ: has the servers' keys.
        stages: records what each group is doing.

    Raises:
        EnvironmentLoadError: verifiers or the package is not installed, or the package's own code raised.
    """
    if require_release(settings.env_id) >= FIRST_OF_V1:
        from trivet.environments.apis.v1.load import load
    else:
        from trivet.environments.apis.v0.load import load
    return load(settings, environ=environ, stages=stages or StageBoard())


def require_release(env_id: str) -> tuple[int, int]:
    """Return the installed release of verifiers, major and minor.

    Raises:
        EnvironmentLoadError: verifiers is not installed, or is older than any that is run.
    """
    try:
        version = importlib.metadata.version(LIBRARY)
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentLoadError(
            f"env.id = {env_id!r} needs verifiers, which is not installed where it runs; install the environment with: "
            f"uv run trivet env install {env_id}"
        ) from None
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    if release < FIRST_OF_V0:
        raise EnvironmentLoadError(
            f"env.id = {env_id!r} runs with verifiers {version}, which trivet cannot run; install verifiers 0.3 for an "
            "environment of the v0 API (load_environment), or 0.4 or newer for one of the v1 API"
        )
    return release


def find_problem(module: str) -> str:
    """Import the module of an environment; return why it does not load in one line, or "" when it does.

    The installed release of verifiers decides what it must have: `load_environment`, or a taskset or environment of the v1 API,
    exported through its `__all__`.
    """
    try:
        loaded = importlib.import_module(module)
        release = require_release(module.replace("_", "-"))
    except EnvironmentLoadError as exc:
        return str(exc)
    except (Exception, SystemExit) as exc:  # noqa: BLE001  # whatever an environment raises is reported with its name
        message = " ".join(str(exc).split())
        return f"{type(exc).__name__}: {message}" if message else type(exc).__name__
    has_loader = callable(getattr(loaded, LOADER, None))
    if release < FIRST_OF_V1:
        return "" if has_loader else f"the module {module} has no {LOADER}, by which environments are loaded"
    library = importlib.import_module("verifiers.v1")
    bases = (library.Taskset, library.Env)
    exported = [getattr(loaded, name, None) for name in getattr(loaded, "__all__", ())]
    if any(inspect.isclass(value) and issubclass(value, bases) and value not in bases for value in exported):
        return ""
    if has_loader:
        return f"the module {module} has {LOADER}, which is of the v0 API; verifiers here has the v1 API: require verifiers<0.4"
    return f"the module {module} exports no Taskset or Env through __all__, by which environments of the v1 API are loaded"


def require_installed(env_id: str, *, environments_dir: Path = Path("environments")) -> None:
    """Check that the module of `env_id`, or the file of a function, can be found. Imports nothing.

    Raises:
        EnvironmentLoadError: there is none; the message names the environment with nearly this name, or says how to install it,
            from this checkout when it is there.
    """
    if (file := file_of(env_id)) is not None:
        if not file.is_file():
            raise EnvironmentLoadError(f"env.id = {env_id!r}: there is no file {file}")
        return
    package = env_id.split("/")[-1]
    module = package.replace("-", "_")
    if importlib.util.find_spec(module) is not None:
        return
    if (environments_dir / module).is_dir():
        raise EnvironmentLoadError(
            f"env.id = {env_id!r} is not installed; install it with: uv run trivet env install {package}"
        )
    here = sorted(path.parent.name.replace("_", "-") for path in environments_dir.glob("*/pyproject.toml"))
    installed = [
        found.name.replace("_", "-")
        for found in importlib.metadata.distributions()
        if any(requirement.startswith(LIBRARY) for requirement in found.requires or ())
    ]
    if nearest := difflib.get_close_matches(package.replace("_", "-"), [*here, *installed], n=1, cutoff=0.8):
        raise EnvironmentLoadError(f"env.id = {env_id!r} is not installed (no module {module!r}); did you mean {nearest[0]!r}?")
    raise EnvironmentLoadError(
        f"env.id = {env_id!r} is not installed (no module {module!r}). If you trust it, install it with: "
        f"uv run trivet env install {env_id}{'' if '/' in env_id else ' --from-index'}. "
        f"Environments of this checkout: {', '.join(here) or 'none'}"
    )


def load_failure(settings: HostSettings, error: BaseException, *, called: str) -> EnvironmentLoadError:
    """Return the error for what `called`, a function of the environment's package, raised.

    Raise it from `error`, so that `traceback_tail` finds the place in the user's code.
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
    """Return the last lines of the traceback of the user's own code, without the secrets in its arguments."""
    cause = error.__cause__
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is None:
        return ""
    text = printable(hide_values("".join(traceback.format_exception(cause)), args))
    return "\n  " + "\n  ".join(text.rstrip().splitlines()[-_TRACEBACK_LINES:])
