"""Turns whatever a package's own code raises while an environment is loaded into one error that names the environment."""

import traceback
from collections.abc import Mapping
from typing import Any

from trivet.config.masking import hide_values, mask_table
from trivet.errors import EnvironmentLoadError
from trivet.shown_text import printable
from trivet.wire.workers import HostSettings

_TRACEBACK_LINES = 8


def load_failure(settings: HostSettings, error: BaseException, *, called: str) -> EnvironmentLoadError:
    """Return the error for what `called`, a function of the environment's package, raised.

    Raise it from `error`, so that `traceback_tail` finds the place in the user's code.
    """
    cause = error.__cause__ or error
    said = (
        f"environment {settings.name!r}: {called} of {settings.env_id!r} with args {mask_table(settings.args)} raised "
        f"{type(cause).__name__}: {cause}"
    )
    if isinstance(cause, TypeError):
        said += "; check the args against its signature"
    return EnvironmentLoadError(printable(hide_values(said, settings.args)))


def traceback_tail(error: EnvironmentLoadError, args: Mapping[str, Any]) -> str:
    """Return the last lines of the traceback of the user's own code, without the secrets in its arguments."""
    cause = error.__cause__
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is None:
        return ""
    text = printable(hide_values("".join(traceback.format_exception(cause)), args))
    lines = text.rstrip().splitlines()
    return "\n  " + "\n  ".join(lines[-_TRACEBACK_LINES:])
