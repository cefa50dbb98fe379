"""The console scripts of a run: each checks what is installed, then imports the command and runs it.

The check comes before the import, because a package of a wrong version may fail while it is imported. Nothing heavier than
`trivet.dependencies` may be imported here. Commands that a launcher starts as `python -m …` need no check: the launcher passed it.
"""

import importlib
from functools import partial

from trivet.dependencies import require_dependencies
from trivet.errors import DependencyError
from trivet.process.imports import importing
from trivet.shown_text import print_error


def run_command(module: str) -> int:
    """Run `main` of `module` and return its exit code. If an installed package has a wrong version, return 2 and import nothing."""
    try:
        require_dependencies()
    except DependencyError as exc:
        print_error(exc)
        return exc.exit_code
    with importing():
        command = importlib.import_module(module)
    return command.main()


rl = partial(run_command, "trivet.launcher.commands.rl")
vf_rl = partial(run_command, "trivet.dialects.vf_rl")
sft = partial(run_command, "trivet.launcher.commands.sft")
trainer = partial(run_command, "trivet.launcher.commands.trainer")
orchestrator = partial(run_command, "trivet.orchestrator.main")
inference = partial(run_command, "trivet.inference.main")
