"""The program that imports environment modules: `python -m trivet.environments.packages.import_program FILE MODULE …`.

`import_check` starts it, with the interpreter that has the modules. So it is part of trivet-worker. It appends an answer to FILE
after each module, so a module that ends the process is known by its missing answer. It calls no `load_environment`.
"""

import importlib
import json
import os
import sys
from pathlib import Path

from trivet.environments.packages.installed import LOADER


def find_problem(module: str) -> str:
    """Import `module`; return why it does not load in one line, or "" when it does."""
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as exc:  # noqa: BLE001  # whatever an environment raises is reported with its name
        message = " ".join(str(exc).split())
        return f"{type(exc).__name__}: {message}" if message else type(exc).__name__
    if not callable(getattr(loaded, LOADER, None)):
        return f"the module {module} has no {LOADER}, by which environments are loaded"
    return ""


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
