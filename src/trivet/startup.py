"""The console scripts of a run: each checks what is installed, then imports the command and runs it.

The check comes before the import, because a package of a wrong version may fail while it is imported. Nothing heavier than
`trivet.dependencies` may be imported here. Commands that a launcher starts as `python -m …` were checked by that launcher.
"""

import importlib

from trivet.dependencies import require_dependencies
from trivet.errors import DependencyError
from trivet.process.imports import importing
from trivet.shown_text import print_error


def rl() -> int:
    """Run the command `rl`; returns its exit code."""
    return run_command("trivet.launcher.commands.rl")


def vf_rl() -> int:
    """Run the command `vf-rl`; returns its exit code."""
    return run_command("trivet.dialects.vf_rl")


def sft() -> int:
    """Run the command `sft`; returns its exit code."""
    return run_command("trivet.launcher.commands.sft")


def trainer() -> int:
    """Run the command `trainer`; returns its exit code."""
    return run_command("trivet.launcher.commands.trainer")


def orchestrator() -> int:
    """Run the command `orchestrator`; returns its exit code."""
    return run_command("trivet.orchestrator.main")


def inference() -> int:
    """Run the command `inference`; returns its exit code."""
    return run_command("trivet.inference.main")


def run_command(module: str) -> int:
    """Run `main` of `module` and return its exit code; 2, without importing it, when an installed package has a wrong version."""
    try:
        require_dependencies()
    except DependencyError as exc:
        print_error(exc)
        return exc.exit_code
    with importing():
        command = importlib.import_module(module)
    return command.main()
