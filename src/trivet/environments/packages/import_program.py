"""The program that imports environment modules: `python -m trivet.environments.packages.import_program MODULE …`.

`discovery` starts it, with the interpreter that has the modules. So it is part of trivet-worker. It prints an answer after each
module, so a module that ends the process is known by its missing answer. It calls no `load_environment`.
"""

import importlib
import inspect
import json
import os
import sys

from trivet.environments.apis.load import FIRST_OF_V1, LOADER, require_release
from trivet.errors import EnvironmentLoadError


def find_problem(module: str) -> str:
    """Import `module`; return why it does not load in one line, or "" when it does.

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


def main() -> None:
    """Import the modules named on the command line and print an answer for each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the modules print is no answer
    for module in sys.argv[1:]:
        print(json.dumps([module, find_problem(module)]), file=answers, flush=True)
    os._exit(0)  # does not wait for threads that the environments have started


if __name__ == "__main__":
    main()
