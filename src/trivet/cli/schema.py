"""The tool `trivet schema`: writes the JSON schemas of the configuration files.

The example configurations name them in their first line, `#:schema ../../.schemas/rl.json`, which Even Better TOML and taplo read.
"""

import argparse
import json
from pathlib import Path

from trivet.config.json_schema import json_schema
from trivet.config.reference import EXAMPLES

DIRECTORY = Path(".schemas")
"""The directory that the example configurations name. It is not part of the repository: it follows from the installed version."""


def configure_schema(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trivet schema`."""
    help_text = "the directory to write (default: .schemas, which the example configurations name)"
    parser.add_argument("directory", type=Path, nargs="?", default=DIRECTORY, metavar="DIR", help=help_text)


def run_schema(arguments: argparse.Namespace) -> int:
    """Write a schema for each command. Return the exit code."""
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for kind, (command, _) in EXAMPLES.items():
        path = arguments.directory / f"{command}.json"
        path.write_text(json.dumps(json_schema(kind), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path}: for the first line of a file of `{command}`, counted from its folder: #:schema {path}")
    return 0
