"""Section of one environment, `[[orchestrator.env]]` and `[[env]]` of `eval`, and the keys of the processes that run them."""

from pathlib import Path
from typing import Annotated, Any, Literal

from packaging.version import Version
from pydantic import AfterValidator, Field

from trivet.config.environment_ids import parse_environment_id
from trivet.config.layout import SECRET_FILE
from trivet.config.sections.addresses import Host
from trivet.config.sections.base import MAX_PROCESSES, MAX_WAIT_S, Section
from trivet.config.sections.sampling import EnvSamplingConfig
from trivet.process.imports import is_in_a_file

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
    if is_in_a_file(id_or_function) and id_or_function.isprintable():
        return id_or_function
    parse_environment_id(_require_name(id_or_function))
    return id_or_function


def _require_variable(name: str) -> str:
    if name == SECRET_FILE or not name.isidentifier():
        raise ValueError(f"names a variable of the environment, and never {SECRET_FILE}, which holds the secret of the run")
    return name


EnvName = Annotated[str, AfterValidator(_require_name)]
EnvId = Annotated[str, AfterValidator(_require_id)]
VariableName = Annotated[str, AfterValidator(_require_variable)]


class EnvWorkersConfig(Section):
    """Keys of the processes that run environments. The orchestrator and the command `eval` have them."""

    workers_per_env: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Processes that run each environment. One runs many rollouts at a time; more help where its own Python is slow."""
    max_env_worker_restarts: int = Field(default=5, ge=-1)
    """A worker that ended this often in a row, without finishing a group in between, ends the run or the evaluation; -1: never."""
    max_worker_memory: float | None = Field(default=None, gt=0)
    """Most memory of one worker with all that it started, GiB. One that takes more is ended, named and started again. Unset: half
    of the machine's memory, or of its container's."""
    strict_data: bool = False
    """Refuse an environment whose data differ from those of the checkpoint resumed from, or from one worker to another, as data do
    that are drawn without a seed. False: a warning says it."""
    env_start_timeout_s: float = Field(default=1800.0, gt=0, le=MAX_WAIT_S)
    """Longest time for load_environment, downloads of data included, seconds."""
    env_worker_timeout_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """A worker whose event loop is blocked for longer, by synchronous code of its environment, is ended and started again,
    seconds."""
    rollout_timeout_s: float | None = Field(default=3600.0, gt=0, le=MAX_WAIT_S)
    """Longest time for the rollouts of one example and their scores, seconds; a group that needs longer fails. None: any."""


class EnvNodesConfig(Section):
    """The nodes that run environment workers. deployment.env_worker_nodes fills it in."""

    nodes: list[int] = Field(min_length=1)
    """The numbers of these nodes."""
    own: int = Field(ge=0)
    """The number of the node of this process."""
    host: Host
    """Where the orchestrator listens for the pools of the other nodes."""
    port: int = Field(ge=1, le=65535)
    """The port there, which the launcher holds."""


class EnvConfig(Section):
    """An environment: its package, its arguments, and how the policy is sampled in it."""

    id: EnvId = "reverse-text"
    """Package name of the environment, or `path/to/file.py:load_environment`: a function that returns one. `my-env@0.1.2` and
    `my-env==0.1.2` ask for a version, which must be the installed one."""
    name: EnvName | None = None
    """Name in logs and metrics; defaults to the id without its version, and for a function to the name of its file. Unique."""
    args: dict[str, Any] = {}
    """Passed to load_environment."""
    on_reward_error: Literal["drop", "zero"] = "drop"
    """A reward function that raises, or returns no reward (text, a list, NaN): `drop` fails the group with that error, so that no
    bug is trained on; `zero` takes 0 for it, as verifiers does."""
    venv: str = "auto"
    """Virtual environment of the environment's workers: the name of one that `trivet env install` made, or the path of another.
    `auto` takes the one that the environment was installed into, else trivet's own; `trivet` takes trivet's own."""
    env_vars: list[VariableName] = []
    """Variables that the workers get although their name is that of a secret (`KEY`, `TOKEN`, `PASSWORD` and the like in it), e.g.
    `["HF_TOKEN", "JUDGE_API_KEY"]`. They always get every other variable, and the keys that `client.api_key_var` names."""
    keep_variables: list[VariableName] = []
    """An older name of `env_vars`. Both count."""
    sampling: EnvSamplingConfig = EnvSamplingConfig()

    @property
    def program(self) -> tuple[str, dict[str, Any], str, list[str], str]:
        """All that a worker is started with. Workers of one environment can run any other with an equal program."""
        return self.package, self.args, self.on_reward_error, sorted({*self.env_vars, *self.keep_variables}), self.venv

    @property
    def label(self) -> str:
        """The environment's name in logs, metrics and file names."""
        return self.name or (Path(self.id).stem if is_in_a_file(self.id) else self.package)

    @property
    def package(self) -> str:
        """The id without its version, by which a worker loads the environment."""
        return self.id if is_in_a_file(self.id) else parse_environment_id(self.id).package

    @property
    def version(self) -> Version | None:
        """The version that must be installed; None for any."""
        return None if is_in_a_file(self.id) else parse_environment_id(self.id).version
