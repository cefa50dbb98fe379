"""The program that imports environment modules: `python -m trivet.environments.packages.import_program FILE MODULE …`.

`import_check` starts it, with the interpreter that has the modules. So it is part of trivet-worker. It appends an answer to FILE
after each module, so a module that ends the process is known by its missing answer. It calls no `load_environment`.
"""

import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from types import ModuleType

from trivet.environments.apis.load import FIRST_OF_V1, require_release
from trivet.environments.packages.installed import LOADER
from trivet.errors import EnvironmentLoadError

_V1_CLASSES = ("Taskset", "Env")
"""The classes of `verifiers.v1` of which a module of the v1 API exports one that is derived, through its `__all__`."""


def find_problem(module: str) -> str:
    """Import `module`; return why it does not load in one line, or "" when it does.

    The installed release of verifiers decides what it must have: `load_environment`, or a taskset or environment of the v1 API.
    """
    try:
        loaded = importlib.import_module(module)
        release = require_release(module.replace("_", "-"))
    except EnvironmentLoadError as exc:
        return str(exc)
    except (Exception, SystemExit) as exc:  # noqa: BLE001  # whatever an environment raises is reported with its name
        message = " ".join(str(exc).split())
        return f"{type(exc).__name__}: {message}" if message else type(exc).__name__
    if release >= FIRST_OF_V1:
        return _find_v1_problem(loaded)
    if not callable(getattr(loaded, LOADER, None)):
        return f"the module {module} has no {LOADER}, by which environments are loaded"
    return ""


def _find_v1_problem(loaded: ModuleType) -> str:
    library = importlib.import_module("verifiers.v1")
    bases = tuple(getattr(library, name) for name in _V1_CLASSES)
    exported = [getattr(loaded, name, None) for name in getattr(loaded, "__all__", ())]
    if any(inspect.isclass(value) and issubclass(value, bases) and value not in bases for value in exported):
        return ""
    if callable(getattr(loaded, LOADER, None)):
        problem = f"has {LOADER}, which is of the v0 API; verifiers here has the v1 API: require verifiers<0.4"
    else:
        problem = "exports no Taskset or Env through __all__, by which environments of the v1 API are loaded"
    return f"the module {loaded.__name__} {problem}"


def main() -> None:
    """Import the modules named on the command line and append an answer for each to a file."""
    answers, *modules = sys.argv[1:]
    with Path(answers).open("a") as file:
        for module in modules:
            file.write(json.dumps([module, find_problem(module)]) + "\n")
            file.flush()
    os._exit(0)  # does not wait for threads that the environments have started


if __name__ == "__main__":
    main()
