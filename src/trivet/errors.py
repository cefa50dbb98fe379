"""The exception tree. Every error a user can meet is one of these, and says what to change.

TrivetError                  exit code 1 unless said otherwise
├── ConfigError              2: a value the user wrote; nothing was started
│   └── RunDirectoryBusy     2: another run holds the output directory
├── EnvironmentLoadError     2: an environment is missing or its load_environment raised
├── DependencyError          2: an installed package has a version that trivet does not run with; nothing was started
├── MessageRefused           a message of another run, another schema, or too large
├── WeightsError             a weights directory is incomplete or altered
├── CheckpointError          a checkpoint is incomplete, altered or does not fit
│   └── ResumeError          2: the step to resume from is not there; nothing was started
├── DiskFull                 no room for what must be written next; everything committed before is whole
├── OutOfMemory              a row or an update does not fit into the memory of the device
├── HistoryError             a run's history cannot be read
├── InferenceError           an inference server is unreachable, refused a request or answered wrongly
│   ├── InferenceTimeout     it did not answer in time
│   ├── PolicyRefused        it does not load a weights directory that is not whole
│   └── ForeignPolicy        it serves a policy that this run did not give it
├── RolloutFailed            a rollout failed on every attempt or could not be scored; costs its group
├── WorkerLost               an environment worker ended while it ran a group; the group may be run again
├── BatchError               no batch can be made: every rollout fails or carries no signal
├── WaitTimeout              a bounded wait ran out; says who waited for whom
├── UnknownRank              another program connected in the place of a rank of the trainer
├── RoleFailed               a process of the run ended early
└── Diverged                 3: NaN or infinite loss, or a stop rule fired
"""


class TrivetError(Exception):
    exit_code = 1


class ConfigError(TrivetError, ValueError):
    exit_code = 2


class RunDirectoryBusy(ConfigError):
    pass


class EnvironmentLoadError(TrivetError):
    exit_code = 2


class DependencyError(TrivetError):
    exit_code = 2


class MessageRefused(TrivetError):
    pass


class WeightsError(TrivetError):
    pass


class CheckpointError(TrivetError):
    pass


class ResumeError(CheckpointError):
    exit_code = 2


class DiskFull(TrivetError):
    pass


class OutOfMemory(TrivetError):
    pass


class HistoryError(TrivetError):
    pass


class InferenceError(TrivetError):
    pass


class InferenceTimeout(InferenceError):
    pass


class PolicyRefused(InferenceError):
    pass


class ForeignPolicy(InferenceError):
    pass


class RolloutFailed(TrivetError):
    def __init__(self, message: str, *, kind: str = "RolloutFailed") -> None:
        """
        Args:
            kind: type of the error behind it, by which failures are counted.
        """
        super().__init__(message)
        self.kind = kind


class WorkerLost(TrivetError):
    pass


class BatchError(TrivetError):
    pass


class WaitTimeout(TrivetError):
    pass


class UnknownRank(TrivetError):
    pass


class RoleFailed(TrivetError):
    pass


class Diverged(TrivetError):
    exit_code = 3


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What to show of a group of errors: the first of ours, which says what to do, else the first."""
    leaves = list(_leaves(group))
    return next((leaf for leaf in leaves if isinstance(leaf, TrivetError)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for member in error.exceptions for leaf in _leaves(member)]
    return [error]
