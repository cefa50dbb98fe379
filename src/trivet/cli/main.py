"""The command `trivet`: tools around a run. A tool is two functions, `configure_NAME` and `run_NAME`, imported when it is used."""

import argparse
import importlib
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from trivet.config.user_input import usable_path
from trivet.errors import TrivetError
from trivet.process.closed_output import run_until_output_closes
from trivet.shown_text import print_error

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Tool(NamedTuple):
    """A tool of the command `trivet`."""

    module: str
    """The module with `configure_NAME(parser)`, which adds arguments, and `run_NAME(arguments)`, which returns the exit code."""
    summary: str
    """The tool's line in the help."""


class _Parser(argparse.ArgumentParser):
    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        """Print the help. A failed write raises here; argparse would ignore it."""
        (file or sys.stdout).write(self.format_help())


TOOLS = {
    "status": Tool("run_tools", "what a run is doing: who waits for whom, since when, and how it ended"),
    "view": Tool("run_tools", "a run as a web page on this machine: curves, time line, rollouts, evaluations"),
    "top": Tool("run_tools", "a run at a glance in the terminal"),
    "evals": Tool("run_tools", "evaluations in the terminal: scores, rollouts, two policies side by side"),
    "check": Tool("run_tools", "prove that a run lost and repeated nothing, or name the event that broke it"),
    "explain": Tool("explain", "why each token of a step was trained or not, and what it added to the loss"),
    "bisect": Tool("bisect", "after which recorded batch a metric or a held-out score broke"),
    "compare": Tool("compare", "whether one run is better than another, on the same examples at equal cost"),
    "selection": Tool("selection", "how what a run trained differs from what it sampled: length, reward, difficulty, latency"),
    "replay": Tool("replay", "score a run's saved rollouts with today's reward functions, and show what changed"),
    "merge": Tool("run_tools", "put a trained adapter into its base model, as a model that any program loads"),
    "quickstart": Tool("quickstart", "teach a tiny model to reverse texts, in minutes: the whole program at work"),
    "init": Tool("init", "a workspace: project file, example environments and configurations, endpoints"),
    "env": Tool("env", "environment packages: init NAME writes one; install NAME|PATH, list, test NAME, remove NAME"),
    "schema": Tool("schema", "write JSON schemas of the configuration files, by which editors complete and check them"),
    "migrate": Tool("migrate", "turn a configuration of prime-rl, of vf-rl or of TRL's scripts into one of ours"),
    "completion": Tool("completion", "print a script by which bash or zsh completes the commands and their keys"),
    "gateway": Tool("gateway", "sessions for agents that run elsewhere: a base URL and a key each, and their reward"),
    "cluster": Tool("cluster", "kubernetes FILE or skypilot FILE: the manifest or task of a run over machines of a cluster"),
    "doctor": Tool("doctor", "what this machine has for a run, what is missing, and how to get it"),
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


def make_parser(configured: Collection[str] = tuple(TOOLS)) -> argparse.ArgumentParser:
    """Return the parser of the command.

    Args:
        configured: tools whose arguments it knows. Importing the others takes time, and some need packages that may be absent.
    """
    parser = _Parser(prog="trivet", description="Tools around a run.")
    parser.add_argument("--version", action="store_true", help="print the version of trivet")
    commands = parser.add_subparsers(dest="tool", metavar="TOOL", required=True)
    for name, tool in TOOLS.items():
        command = commands.add_parser(name, help=tool.summary, description=f"{tool.summary[0].upper()}{tool.summary[1:]}.")
        if name in configured:
            getattr(_import(tool), f"configure_{name}")(command)
    return parser


def _run_tool(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--version"]:
        from trivet.dependencies import own_version  # here: `init` runs before the packages are installed that this imports

        print(f"trivet {own_version()}")
        return 0
    try:
        parsed = make_parser([word for word in arguments if word in TOOLS][:1]).parse_args(arguments)
        for name, given in vars(parsed).items():
            for value in given if isinstance(given, list) else [given]:
                if isinstance(value, Path):
                    usable_path(value, key=name.upper())  # raises for a path that no system can have, and names the argument
        return getattr(_import(TOOLS[parsed.tool]), f"run_{parsed.tool}")(parsed)
    except TrivetError as exc:
        print_error(exc)
        return exc.exit_code


def _import(tool: Tool) -> ModuleType:
    try:
        return importlib.import_module(f"{__package__}.{tool.module}")
    except ImportError:
        # Raises an error that says which package to install. Imported here: `init` runs before any package is installed.
        from trivet.dependencies import require_dependencies

        require_dependencies()
        raise


if __name__ == "__main__":
    raise SystemExit(main())
