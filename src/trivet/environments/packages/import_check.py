"""Imports environment modules in a process of their own and says for each why it does not load.

Commands call `check_imports`, which starts `import_program` with the interpreter that has the modules.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trivet.environments.settings import interpreter_variables, worker_environment
from trivet.process.lifetime import module_command, tied_command

_IMPORT_TIMEOUT_S = 120.0
"""For all modules of one process. verifiers alone takes 5 to 20 s on two busy cores."""


def check_imports(
    modules: Sequence[str], *, python: str = sys.executable, timeout_s: float = _IMPORT_TIMEOUT_S
) -> dict[str, str]:
    """Return the problem of each module in one line, by module; "" for one that loads.

    The modules share one process, so what they share is imported once. If a module ends that process or exceeds the time, it gets
    the blame, and a new process takes the rest.
    """
    problems: dict[str, str] = {}
    remaining = list(modules)
    while remaining:
        answers, ending = _run_process(remaining, python, timeout_s=timeout_s)
        problems |= answers
        remaining = [module for module in remaining if module not in problems]
        if remaining and ending:
            problems[remaining.pop(0)] = ending
    return problems


def _run_process(modules: Sequence[str], python: str, *, timeout_s: float) -> tuple[dict[str, str], str]:
    """Return the answers, and how the process ended when it did not answer for all."""
    with tempfile.TemporaryDirectory(prefix="trivet-import-") as directory:
        answers = Path(directory) / "answers.jsonl"
        command = module_command("trivet.environments.packages.import_program", str(answers), *modules, python=python)
        environ = worker_environment(os.environ)
        try:
            done = subprocess.run(
                tied_command(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=timeout_s,
                check=False,
                env={**environ, **interpreter_variables(python, environ)},
                start_new_session=True,
            )
            ending = f"importing it ended the process with exit code {done.returncode}"
            if lines := done.stderr.decode(errors="replace").strip().splitlines():
                ending += f": {lines[-1]}"
        except subprocess.TimeoutExpired:
            ending = f"importing it took more than {timeout_s:.0f} s"
        lines = answers.read_text().splitlines() if answers.exists() else []
    return dict(json.loads(line) for line in lines), ending
