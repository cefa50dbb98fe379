"""The command `trivet`: tools around a run. Each is a module with `configure` and `run`, imported only when it is used."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from trivet.config.user_input import usable_path
from trivet.errors import TrivetError
from trivet.process.closed_output import run_until_output_closes
from trivet.shown_text import print_error

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class ToolModule(Protocol):
    """The functions that the module of a tool offers."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the tool's arguments."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Do its work; returns the exit code. A TrivetError is shown, and its own exit code returned."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool of the command `trivet`."""

    module: str
    does: str
    """Its line in the help."""


class _Parser(argparse.ArgumentParser):
    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        """Print the help; argparse's own ignores that the output cannot be written."""
        (file or sys.stdout).write(self.format_help())


TOOLS = {
    "status": Tool(module="trivet.tools.status", does="what a run is doing: who waits for whom, since when, and how it ended"),
    "view": Tool(
        module="trivet.tools.view", does="a run as a web page on this machine: curves, time line, rollouts, evaluations"
    ),
    "top": Tool(module="trivet.tools.top", does="a run at a glance in the terminal"),
    "evals": Tool(module="trivet.tools.evals", does="evaluations in the terminal: scores, rollouts, two policies side by side"),
    "check": Tool(
        module="trivet.tools.check", does="prove that a run lost and repeated nothing, or name the event that broke it"
    ),
    "replay": Tool(
        module="trivet.tools.replay", does="score a run's saved rollouts with today's reward functions, and show what changed"
    ),
    "merge": Tool(
        module="trivet.tools.merge", does="put a trained adapter into its base model, as a model that any program loads"
    ),
    "quickstart": Tool(
        module="trivet.tools.quickstart", does="teach a tiny model to reverse texts, in minutes: the whole program at work"
    ),
    "init": Tool(
        module="trivet.tools.init", does="a workspace: project file, example environments and configurations, endpoints"
    ),
    "env": Tool(
        module="trivet.tools.env", does="environment packages: init NAME writes one; install NAME|PATH, list, remove NAME"
    ),
    "doctor": Tool(module="trivet.tools.doctor", does="what this machine has for a run, what is missing, and how to get it"),
}
"""The tools by the name that is typed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a tool.

    Args:
        argv: arguments; None takes those of this process.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_until_output_closes(lambda: _run_tool(arguments))


def _run_tool(arguments: Sequence[str]) -> int:
    parser = _Parser(prog="trivet", description="Tools around a run.")
    commands = parser.add_subparsers(dest="tool", metavar="TOOL", required=True)
    chosen = next((word for word in arguments if word in TOOLS), None)
    try:
        for name, tool in TOOLS.items():
            command = commands.add_parser(name, help=tool.does, description=f"{tool.does[0].upper()}{tool.does[1:]}.")
            if name == chosen:
                _import(tool).configure(command)
        parsed = parser.parse_args(arguments)
        _require_usable_paths(parsed)
        return _import(TOOLS[parsed.tool]).run(parsed)
    except TrivetError as exc:
        print_error(exc)
        return exc.exit_code


def _require_usable_paths(parsed: argparse.Namespace) -> None:
    """Check every path among the arguments."""
    paths = [(name, value) for name, given in vars(parsed).items() for value in (given if isinstance(given, list) else [given])]
    paths = [(name, value) for name, value in paths if isinstance(value, Path)]
    for name, path in paths:
        usable_path(path, key=name.upper())


def _import(tool: Tool) -> ToolModule:
    """Import the module of a tool."""
    try:
        return cast("ToolModule", importlib.import_module(tool.module))
    except ImportError:
        # Not at the top: `init` makes a workspace before any package is installed.
        from trivet.dependencies import require_dependencies

        require_dependencies()
        raise


if __name__ == "__main__":
    raise SystemExit(main())
