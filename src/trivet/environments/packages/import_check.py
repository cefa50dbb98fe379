"""Imports environment modules in a process of their own and says for each why it does not load.

Commands call `check_imports`. It starts `python -m trivet.environments.packages.import_check MODULE …`, which answers after each
module, so a module that ends the process is known by its missing answer. No `load_environment` is called.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trivet.environments.packages.installed import LOADER
from trivet.environments.settings import worker_environment
from trivet.process.lifetime import module_command, tied_command

_IMPORT_TIMEOUT_S = 120.0
"""For all modules of one process. verifiers alone takes 5 to 20 s on two busy cores."""


def check_imports(modules: Sequence[str], *, timeout_s: float = _IMPORT_TIMEOUT_S) -> dict[str, str]:
    """Return the problem of each module in one line, by module; "" for one that loads.

    The modules share one process, so what they share is imported once. If a module ends that process or exceeds the time, it gets
    the blame, and a new process takes the rest.
    """
    problems: dict[str, str] = {}
    remaining = list(modules)
    while remaining:
        answers, ending = _run_process(remaining, timeout_s=timeout_s)
        problems |= answers
        remaining = [module for module in remaining if module not in problems]
        if remaining and ending:
            problems[remaining.pop(0)] = ending
    return problems


def _run_process(modules: Sequence[str], *, timeout_s: float) -> tuple[dict[str, str], str]:
    """Return the answers, and how the process ended when it did not answer for all."""
    with tempfile.TemporaryDirectory(prefix="trivet-import-") as directory:
        answers = Path(directory) / "answers.jsonl"
        command = tied_command(module_command("trivet.environments.packages.import_check", str(answers), *modules))
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=timeout_s,
                check=False,
                env=worker_environment(os.environ),
                start_new_session=True,
            )
            ending = f"importing it ended the process with exit code {done.returncode}"
            if lines := done.stderr.decode(errors="replace").strip().splitlines():
                ending += f": {lines[-1]}"
        except subprocess.TimeoutExpired:
            ending = f"importing it took more than {timeout_s:.0f} s"
        lines = answers.read_text().splitlines() if answers.exists() else []
    return dict(json.loads(line) for line in lines), ending


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
