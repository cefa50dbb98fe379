"""Turns what the commands say into the errors of a program: the names are those that a user of the library writes."""

import re
from collections.abc import Mapping

from trivet.config.vllm_keys import VLLM_KEYS
from trivet.errors import ConfigError, Diverged, RoleFailed, TrivetError
from trivet.library.process import RunProcess
from trivet.shown_text import printable

_SPELLINGS = (
    (re.compile(r"\btrainer\.args\.(?=\w)"), ""),
    (re.compile(r"\b(trainer|inference)\.gpus\b"), r"\1_gpu_ids"),
    *((re.compile(rf"\binference\.args\.{name}\b"), f"inference.{key}") for name, key in VLLM_KEYS.items()),
    (re.compile(r"\binference\.args\."), "inference.vllm_args."),
    (re.compile(r"--(trainer\.)?ckpt\.resume-step -1"), "resume_from_checkpoint=True"),
    (re.compile(r"--trainer\.args\.resume-from-checkpoint true"), "resume_from_checkpoint=True"),
    (re.compile(r"--clean\b|--trainer\.args\.overwrite-output-dir true"), "overwrite_output_dir=True"),
)
"""What a user of a command types, to what a user of `RLTrainer` writes."""
_ERRORS: Mapping[int, type[TrivetError]] = {2: ConfigError, 3: Diverged}
"""What an exit code of a command means; any other than 0 means that a role failed."""
_REFUSAL = re.compile(r"^error: ", re.MULTILINE)
"""What a command prints before the reason for which it started nothing."""


def in_python(text: str) -> str:
    """Return a message with the names that a user of `RLTrainer` knows."""
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text


def require_success(process: RunProcess, *, details: str = "") -> None:
    """Raise the error that ended a process, unless it succeeded or this program ended it.

    Args:
        details: what is known of the failure besides the output of the process.

    Raises:
        TrivetError: by the exit code; its text has the last lines of what failed.
    """
    exit_code = process.exit_code
    if exit_code in (0, None) or process.is_interrupted:
        return
    printed = printable(process.last_output())
    *_, last = _REFUSAL.split(printed)
    text = last if last != printed else f"the run ended with exit code {exit_code}: {details or printed}"
    raise _ERRORS.get(exit_code or 1, RoleFailed)(in_python(text.strip()))
