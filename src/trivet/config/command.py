"""Runs every command that has a configuration: handles help, dry runs, notices and exit codes around the command's own work."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from trivet.config.check_files import require_files
from trivet.config.compute_dtype import settle_compute_dtype
from trivet.config.findings import Findings
from trivet.config.load import LoadedConfig, load_arguments
from trivet.config.schema.base import Section
from trivet.config.sources import Arguments, parse_arguments
from trivet.dependencies import own_version
from trivet.errors import ConfigError, DiskFull, TrivetError
from trivet.key_names import names_from_variable, use_names
from trivet.machine import inspect_machine
from trivet.process.closed_output import run_until_output_closes
from trivet.process.proxies import OWN_DIRECT, find_unusable
from trivet.shown_text import print_error, printable
from trivet.storage.disk import describe_full_disk, is_full_disk

TargetT = TypeVar("TargetT", bound=Section)


class Submit(Protocol[TargetT]):
    """Submits a command to a scheduler, if the command's configuration asks for it."""

    def __call__(self, loaded: LoadedConfig[TargetT], *, is_dry_run: bool) -> int | None:
        """Submit the command, whose `auto` dtypes are not replaced yet: the scheduler's machine chooses them.

        Returns the exit code; None if the configuration names no scheduler, so that the command runs here.
        """
        ...


def run_command(
    kind: type[TargetT],
    main: Callable[[TargetT], int],
    argv: Sequence[str] | None = None,
    *,
    check: Callable[[TargetT], None] | None = None,
    dry_run: Callable[[TargetT], None] | None = None,
    submit: Submit[TargetT] | None = None,
) -> int:
    """Load a `kind` from the command line and pass it to `main`. The arguments are those of `run_translated`.

    Another command may have started this process. Messages then name the keys by the names that its user knows.
    """
    with use_names(names_from_variable(os.environ)):
        return run_translated(kind, main, argv, translate=lambda loaded: loaded, check=check, dry_run=dry_run, submit=submit)


def run_translated(
    kind: type[Section],
    main: Callable[[TargetT], int],
    argv: Sequence[str] | None = None,
    *,
    translate: Callable[[LoadedConfig[Any]], LoadedConfig[TargetT]],
    check: Callable[[TargetT], None] | None = None,
    dry_run: Callable[[TargetT], None] | None = None,
    submit: Submit[TargetT] | None = None,
) -> int:
    """Load a `kind` from the command line, translate it to the configuration that the command works with, and pass that to `main`.

    Args:
        argv: the words after the command's name; None takes those of this process.
        translate: returns the configuration that `main` takes.
        check: checks that only this command has; it raises a TrivetError. It starts nothing, and runs for `--dry-run` too.
        dry_run: further checks for `--dry-run` alone. They take long, so `main` does them itself while it starts.
        submit: submits the command to a scheduler if the configuration asks for it.

    Returns:
        The exit code: of `main`, of the TrivetError that ended it, or 141 if the reader of the output closed the pipe.
    """
    words = sys.argv[1:] if argv is None else argv
    findings = Findings()
    arguments = parse_arguments(kind, words, findings)

    def run() -> int:
        loaded = translate(_load(kind, arguments, findings, shows_usage=not words))
        loaded = replace(loaded, omits_defaults=arguments.omits_defaults)
        if submit is not None and (exit_code := submit(loaded, is_dry_run=arguments.is_dry_run)) is not None:
            return exit_code
        require_files(loaded.config)
        loaded = settle_compute_dtype(loaded, machine=inspect_machine(), does_record=not arguments.is_dry_run)
        if check is not None:
            check(loaded.config)
        _print_notices(loaded.notices)
        if not arguments.is_dry_run:
            return main(loaded.config)
        if dry_run is not None:
            dry_run(loaded.config)
        print(loaded.to_shown_toml(), end="")
        return 0

    def run_or_report() -> int:
        try:
            return _print_information(kind, arguments) if arguments.only_inform else run()
        except TrivetError as exc:
            print_error(exc)
            return exc.exit_code
        except OSError as exc:
            if not is_full_disk(exc) or arguments.only_inform:
                raise  # it writes only to the output: if that is full, there is no place for a message
            print_error(describe_full_disk(exc))
            return DiskFull.exit_code

    return run_until_output_closes(run_or_report)


def _print_notices(notices: Sequence[str]) -> None:
    """Print the notices, and one more if a proxy that the environment names cannot be used."""
    unusable = find_unusable(os.environ)
    for notice in (*notices, *([f"{unusable}; {OWN_DIRECT}"] if unusable else [])):
        print(f"notice: {printable(notice)}", file=sys.stderr)


def _print_information(kind: type[Section], arguments: Arguments) -> int:
    """Print the version or the help."""
    if arguments.help_section is None:
        print(f"trivet {own_version()}")
        return 0
    from trivet.config.reference import help_text  # here: it imports what only help needs

    print(help_text(kind, arguments.help_section))
    return 0


def _load(kind: type[Section], arguments: Arguments, findings: Findings, *, shows_usage: bool) -> LoadedConfig[Any]:
    """Load the configuration. If that fails and `shows_usage`, print first how the command is called."""
    try:
        return load_arguments(kind, arguments, findings, environ=os.environ)
    except ConfigError:
        if shows_usage:
            from trivet.config.reference import usage_text  # here: it imports what only help needs

            print(usage_text(kind), file=sys.stderr)
        raise
