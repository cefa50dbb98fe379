"""`trivet merge ADAPTER OUTPUT`: an adapter and its base model as one whole model."""

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument("adapter", type=Path, metavar="ADAPTER", help="a published weights/step_N, or any adapter of PEFT's")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the directory to write; it must not be there yet")
    parser.add_argument("--base", metavar="MODEL", help="the base model, where it is elsewhere than when it was trained with")


def run(arguments: argparse.Namespace) -> int:
    """Merge and write the model; returns the exit code.

    Raises:
        ConfigError: there is no such adapter or base model, or the output is there already.
        WeightsError: the adapter is not what was published.
    """
    from trivet.trainer.model.merge import merge

    base = merge(arguments.adapter, output=arguments.output, base=arguments.base)
    print(f"{arguments.output} is {base} with {arguments.adapter}")
    return 0
