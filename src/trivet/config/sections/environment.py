"""Section of one environment, `[[orchestrator.env]]` and `[[env]]` of `eval`, and the keys of the processes that run them."""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from trivet.config.sections.base import MAX_PROCESSES, MAX_WAIT_S, Section
from trivet.config.sections.sampling import EnvSamplingConfig
from trivet.process.imports import is_in_a_file

Credential = Literal["WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]
CREDENTIALS: tuple[str, ...] = get_args(Credential)
"""Variables that the run itself needs, and an environment only on request."""
_MAX_NAME_CHARS = 128
"""Longest name. It becomes the name of a directory, which file systems limit to 255 bytes."""


def _require_name(name: str) -> str:
    if not name.isprintable() or len(name) > _MAX_NAME_CHARS or "\\" in name or {"", ".", ".."} & set(name.split("/")):
        raise ValueError(
            f"names a directory of results: it must be printable, have at most {_MAX_NAME_CHARS} characters, and be no path "
            "that starts with / or has .. in it"
        )
    return name


def _require_id(id_or_function: str) -> str:
    return id_or_function if is_in_a_file(id_or_function) and id_or_function.isprintable() else _require_name(id_or_function)


EnvName = Annotated[str, AfterValidator(_require_name)]
EnvId = Annotated[str, AfterValidator(_require_id)]


class EnvWorkersConfig(Section):
    """Keys of the processes that run environments. The orchestrator and the command `eval` have them."""

    workers_per_env: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Processes that run each environment. One runs many rollouts at a time; more help where its own Python is slow."""
    max_env_worker_restarts: int = Field(default=5, ge=-1)
    """A worker that ended this often in a row, without finishing a group in between, ends the run or the evaluation; -1: never."""
    env_start_timeout_s: float = Field(default=1800.0, gt=0, le=MAX_WAIT_S)
    """Longest time for load_environment, downloads of data included, seconds."""
    env_worker_timeout_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """A worker whose event loop is blocked for longer, by synchronous code of its environment, is ended and started again,
    seconds."""
    rollout_timeout_s: float | None = Field(default=3600.0, gt=0, le=MAX_WAIT_S)
    """Longest time for the rollouts of one example and their scores, seconds; a group that needs longer fails. None: any."""


class EnvConfig(Section):
    """An environment: its package, its arguments, and how the policy is sampled in it."""

    id: EnvId = "reverse-text"
    """Package name of the environment, or `path/to/file.py:load_environment`: a function that returns one."""
    name: EnvName | None = None
    """Name in logs and metrics; defaults to the id, and for a function to the name of its file. Unique."""
    args: dict[str, Any] = {}
    """Passed to load_environment."""
    on_reward_error: Literal["drop", "zero"] = "drop"
    """A reward function that raises, or returns None: `drop` fails the group with that error, so that no bug is trained on;
    `zero` takes 0 for it, as verifiers does."""
    keep_variables: list[Credential] = []
    """Credentials of the run that the environment's workers get too, e.g. `["HF_TOKEN"]` for a private data set. They always get
    every other variable (`OPENAI_API_KEY` of a judge), and the keys that `client.api_key_var` names."""
    sampling: EnvSamplingConfig = EnvSamplingConfig()

    @property
    def program(self) -> tuple[str, dict[str, Any], str, list[Credential]]:
        """All that a worker is started with. Workers of one environment can run any other with an equal program."""
        return self.id, self.args, self.on_reward_error, self.keep_variables

    @property
    def label(self) -> str:
        """The environment's name in logs, metrics and file names."""
        return self.name or (Path(self.id).stem if is_in_a_file(self.id) else self.id)
