"""Ranks on this machine: `python -m trivet.trainer.torchrun NUM_RANKS MODULE ARGUMENT…`. Started by the launcher.

torchrun, with three things it lacks: a rank ends with the process that started it, however that ends; the exit code is that of
the rank that failed first, where torchrun's is 1 whatever happened, so that a run that diverged (3) shows as such; and the
directory for what ranks fail with is removed. A single rank needs no torchrun: it runs in this process.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Sequence

from trivet.imports import without_collections
from trivet.lifetime import die_with_parent, module_command, tied_command
from trivet.stacks import ignore_until_listening

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""A rank that finds them joins others (trainer.distributed)."""


def main(argv: Sequence[str]) -> int:
    """Run the ranks to their end; 128 + N when signal N ended them."""
    die_with_parent()
    num_ranks, module, *arguments = argv
    if num_ranks == "1":
        return run_rank(module, arguments)
    # Importing torch takes seconds, which a single rank would wait for.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run_torchrun

    rank = tied_command(module_command(module, *arguments))
    try:
        with tempfile.TemporaryDirectory(prefix="trivet-ranks-", ignore_cleanup_errors=True) as scratch:
            own = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", num_ranks, "--log-dir", scratch]
            run_torchrun([*own, "--no-python", *rank])
    except ChildFailedError as exc:
        _, failure = exc.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as exc:
        return 128 + exc.sigval
    return 0


def run_rank(module: str, arguments: Sequence[str]) -> int:
    """Run `main` of `module` here, as the only rank; returns its exit code."""
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)
    ignore_until_listening()
    sys.argv = [module, *arguments]
    with without_collections():
        rank = importlib.import_module(module)
    return rank.main()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
