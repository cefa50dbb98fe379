"""The tool `trivet migrate`: reads a file, or the command line of one of TRL's scripts, and writes a configuration of ours."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trivet.config.sources import read_toml
from trivet.dialects.migration import Migration, migrate
from trivet.dialects.trl_script import migrate_script
from trivet.errors import ConfigError
from trivet.shown_text import print_error, printable

_DEFAULT_ENV = "my-env"
_TRL_ENDINGS = (".yaml", ".yml", ".json")


def configure_migrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trivet migrate`."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="the file to write (default: standard output)")
    parser.add_argument("--env", default=_DEFAULT_ENV, metavar="ID", help="the environment of a TRL script (default: my-env)")
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="FILE.toml | FILE.yaml | COMMAND …",
        help="a TOML of prime-rl or vf-rl, the YAML or JSON of a TRL script, or the script's command line",
    )


def run_migrate(arguments: argparse.Namespace) -> int:
    """Write the configuration. Return 1 if it does not load before a person changes it, else 0."""
    words = [word for word in arguments.words if word != "--"]
    if not words:
        raise ConfigError("migrate needs a file, or the command line of a TRL script after its own flags")
    migration = _migrate_words(words, env=arguments.env)
    if arguments.output is None:
        sys.stdout.write(migration.to_toml())
    else:
        arguments.output.write_text(migration.to_toml(), encoding="utf-8")
    for problem in migration.problems:
        print_error(ConfigError(f"the result does not load yet: {printable(problem)}"))
    return int(bool(migration.problems))


def _migrate_words(words: Sequence[str], *, env: str) -> Migration:
    if len(words) > 1:
        return migrate_script(_parse_command(words), env=env)
    file = Path(words[0])
    return migrate_script(_read_arguments(file), env=env) if file.suffix in _TRL_ENDINGS else migrate(read_toml(file))


def _read_arguments(path: Path) -> Mapping[str, object]:
    """Return the arguments in a YAML or JSON file, as TRL's `--config` reads it."""
    import yaml

    try:
        values: Any = yaml.safe_load(path.read_bytes())  # JSON is YAML too
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    except (ValueError, yaml.YAMLError) as exc:
        raise ConfigError(f"{path} is no YAML or JSON: {exc}") from exc
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold the arguments of a TRL script by name, got {type(values).__name__}")
    return {str(name).replace("-", "_"): _decoded(value) for name, value in values.items()}


def _parse_command(words: Sequence[str]) -> Mapping[str, object]:
    """Return the arguments of a command line such as `trl grpo --learning_rate 1e-6 --use_peft`."""
    found: dict[str, list[object]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            found[name] = [_decoded(value)] if equals else []
        elif name and not word.endswith(".py"):  # words before the first flag, and a script's name, are the program
            found[name].append(_decoded(word))
    given = {name: (values or [True])[0] if len(values) < 2 else values for name, values in found.items()}
    config = given.pop("config", None)
    return {**(_read_arguments(Path(str(config))) if config is not None else {}), **given}


def _decoded(value: object) -> object:
    """Return the number or the truth value of a text that is one: YAML takes `1e-6` as text, and a command line has texts alone."""
    try:
        return json.loads(value.lower()) if isinstance(value, str) else value
    except ValueError:
        return value
