"""Owns the names that messages have for a user of the library, and raises what the commands say as errors of the program.

The names are given to the commands, so that each message has them from the start (`key_names`).
"""

import re
from collections.abc import Mapping

from trivet.dialects.vf_translation import RUN_KEYS
from trivet.errors import ConfigError, Diverged, RoleFailed, TrivetError
from trivet.library.process import RunProcess
from trivet.shown_text import printable

_ARGS = "trainer.args."
PYTHON_NAMES = {
    **{key: name.removeprefix(_ARGS) for key, name in RUN_KEYS.items() if name.startswith(_ARGS)},
    "model.name": "model",
    "inference.gpus": "inference_gpu_ids",
    "trainer.gpus": "trainer_gpu_ids",
    "--trainer.ckpt.resume-step -1": "resume_from_checkpoint=True",
    "--ckpt.resume-step -1": "resume_from_checkpoint=True",
    "ckpt.resume_step = -1": "resume_from_checkpoint=True",
    "--clean": "overwrite_output_dir=True",
}
"""Names of keys and flags in the messages of a run that `RLTrainer` starts. `RLConfig` takes all other keys by their own names."""
_ERRORS: Mapping[int, type[TrivetError]] = {2: ConfigError, 3: Diverged}
"""Meanings of a command's exit codes; any other than 0 means that a role failed."""
_REFUSAL = re.compile(r"^error: ", re.MULTILINE)
"""Prefix of a refusal."""


def name_in_python(key: str) -> str:
    """Return what a user of `RLTrainer` writes for a key of the run or of the dialect."""
    return PYTHON_NAMES.get(key, key.removeprefix(_ARGS))


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
    raise _ERRORS.get(exit_code or 1, RoleFailed)(text.strip())
