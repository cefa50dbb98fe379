"""The exception tree. Every error a user can meet is one of these, and its message has the remedy."""


class TrivetError(Exception):
    """Any error that a user can meet."""

    exit_code = 1
    """The exit code of a command that the error ends."""


class ConfigError(TrivetError, ValueError):
    """Raised for a value that the user wrote, before anything is started."""

    exit_code = 2


class RunDirectoryBusy(ConfigError):
    """Raised when another run, or another process of the same role, holds the output directory."""

    def __init__(self, message: str, *, is_retried: bool = False) -> None:
        """Choose the exit code.

        Args:
            is_retried: True for a job that its scheduler has started again. The job's own earlier start may still hold the
                directory, so another start is worthwhile.
        """
        super().__init__(message)
        if is_retried:
            self.exit_code = NodesMissing.exit_code


class EnvironmentLoadError(TrivetError):
    """Raised when an environment is not installed, its load_environment raised, or it has no data."""

    exit_code = 2


class DependencyError(TrivetError):
    """Raised when an installed package has a version that trivet does not run with."""

    exit_code = 2


class MessageRefused(TrivetError):
    """Raised for a message of another run, of another schema, or too large."""


class WeightsError(TrivetError):
    """Raised when a weights directory is incomplete or was altered."""


class FetchFailed(TrivetError):
    """Raised when an inference server could not fetch a policy now. A later attempt may succeed."""


class CheckpointError(TrivetError):
    """Raised when a checkpoint is incomplete, was altered, or does not fit the run."""


class ResumeError(CheckpointError):
    """Raised when the step to resume from does not exist, or when a setting changed that a resumed run must keep."""

    exit_code = 2


class DiskFull(TrivetError):
    """Raised when the disk has too little free space, before or during a write."""


class OutOfMemory(TrivetError):
    """Raised when a row or an update does not fit into the memory of the device."""


class HistoryError(TrivetError):
    """Raised when the history of a run cannot be read."""


class InferenceError(TrivetError):
    """Raised when an inference server is unreachable, refused a request or answered wrongly."""


class InferenceTimeout(InferenceError):
    """Raised when an inference server did not answer in time."""


class ServerGone(InferenceError):
    """Raised when nothing listens at an inference server's address: its process ended, or has not started."""


class PolicyRefused(InferenceError):
    """Raised when an inference server does not load a weights directory, because the directory is incomplete or damaged."""


class ForeignPolicy(InferenceError):
    """Raised when an inference server serves a policy that this run did not give it."""


class RolloutFailed(TrivetError):
    """Raised when a rollout failed or could not be scored; it costs its group."""

    def __init__(self, message: str, *, kind: str = "RolloutFailed", is_infrastructure: bool = False) -> None:
        """Note what made the rollout fail.

        Args:
            kind: the name of the type of the original error. Failures are counted by it.
            is_infrastructure: True if a server or the network failed in every attempt, so that the policy is not the cause.
        """
        super().__init__(message)
        self.kind = kind
        self.is_infrastructure = is_infrastructure


class WorkerLost(TrivetError):
    """Raised when an environment worker ended while it ran a group. The group may be run again."""


class BatchError(TrivetError):
    """Raised when no batch can be made: every rollout fails or carries no signal."""


class WaitTimeout(TrivetError):
    """Raised when a bounded wait ran out; the message names the process that waited and what it waited for."""


class UnknownRank(TrivetError):
    """Raised when another program connected in the place of a rank of the trainer."""


class RoleFailed(TrivetError):
    """Raised when a process of the run ended early."""


class SubmissionFailed(TrivetError):
    """Raised when a scheduler did not take a job."""


class NodesMissing(TrivetError):
    """Raised when a node that the run needs did not connect, or was lost and did not return."""

    exit_code = 75
    """The code EX_TEMPFAIL of sysexits.h: a scheduler may start the run again."""


class Diverged(TrivetError):
    """Raised for a NaN or infinite loss, or when a stop rule fired."""

    exit_code = 3


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error of a group to show: the first TrivetError, because its message says what to do, else the first error."""
    leaves = list[BaseException]()
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending[:0] = error.exceptions
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if isinstance(leaf, TrivetError)), leaves[0])
