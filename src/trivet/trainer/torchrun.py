"""torchrun with the exit code of the rank that failed first. Started by the launcher; starts the ranks.

torchrun itself ends with 1 whatever a rank ended with, and a run that diverged (3) could not be told from one that crashed.
"""

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as run_torchrun

from trivet.lifetime import die_with_parent


def main() -> int:
    die_with_parent()
    try:
        run_torchrun()
    except ChildFailedError as exc:
        _, failure = exc.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as exc:
        return 128 + exc.sigval
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
