"""The tool `trivet cluster`: writes what another program starts on machines of a cluster, and prints the command that does so."""

import argparse

from trivet.config.load import load_config
from trivet.config.schema.rl import RLConfig
from trivet.errors import ConfigError
from trivet.schedulers.submit import submit


def configure_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trivet cluster`."""
    parser.add_argument("scheduler", choices=("kubernetes", "skypilot"), help="whose manifest or task is written")
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="FILE",
        help="configuration files of the run, later ones win; then flags of rl",
    )


def run_cluster(arguments: argparse.Namespace) -> int:
    """Write the manifest or task of a run, and print the command that starts it. Return the exit code.

    Raises:
        ConfigError: the files have no table for the scheduler, or it does not fit the other keys.
    """
    words = [word for word in arguments.words if word != "@"]
    num_files = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    files = [part for file in words[:num_files] for part in ("@", file)]
    loaded = load_config(RLConfig, [*files, *words[num_files:]])
    if getattr(loaded.config, arguments.scheduler) is None:
        raise ConfigError(
            f"trivet cluster {arguments.scheduler} needs a table [{arguments.scheduler}] in one of the files; add it"
        )
    exit_code = submit(loaded, command="rl", is_dry_run=False)
    assert exit_code is not None
    return exit_code
