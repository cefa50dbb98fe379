"""The tool `trivet completion`: prints a script by which a shell completes the commands of trivet, their tools and their keys.

shtab writes the script from an argparse parser. So a Tab starts no program, unlike with argcomplete, whose import of the parser
would take a second. The commands with a configuration have a parser of their own; for shtab their keys become options.
"""

import argparse
from typing import Any, Literal, get_args, get_origin

import shtab

from trivet.config.keys import Shape, all_keys, dotted
from trivet.config.reference import EXAMPLES
from trivet.config.schema.base import Section, union_members


def configure_completion(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trivet completion`."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that completes")


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the script. Return the exit code."""
    from trivet.cli.main import make_parser

    print(_complete(make_parser(), arguments.shell))
    for kind, (command, _) in EXAMPLES.items():
        if command == "eval":  # a shell that reads `eval` takes its own command, whose completion stays
            continue
        print(_complete(key_parser(kind, command), arguments.shell))
    return 0


def _complete(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script of one command. That of shtab for zsh registers itself only inside `eval`, here also inside `source`."""
    return shtab.complete(parser, shell=shell).replace("$zsh_eval_context[-1] == eval", "$zsh_eval_context[-1] == (eval|file)")


def key_parser(kind: type[Section], command: str) -> argparse.ArgumentParser:
    """Return a parser with an option for each key of `kind`."""
    parser = argparse.ArgumentParser(prog=command)
    for name in ("--dry-run", "--changed", "--version"):
        parser.add_argument(name, action="store_true")
    added: set[str] = set()
    for path, key in all_keys(kind):
        option = f"--{dotted(path).replace('_', '-')}"
        if option in added or key.shape in (Shape.SECTION, Shape.SECTION_LIST):
            continue
        added.add(option)
        if key.shape is Shape.BOOL:
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, choices=_choices(key.field.annotation) if key.field else None)
    file = parser.add_argument("file", metavar="@FILE", nargs="*")
    file.complete = shtab.FILE  # type: ignore[attr-defined]  # the way in which shtab is told
    return parser


def _choices(annotation: Any) -> list[str] | None:
    """Return the texts that a key allows; None if it allows others too."""
    members = [member for member in union_members(annotation) if member is not type(None)]
    if not all(get_origin(member) is Literal for member in members):
        return None
    return [str(choice) for member in members for choice in get_args(member)]
