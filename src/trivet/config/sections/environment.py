"""Section of one environment: `[[orchestrator.env]]`, `[[env]]` of `eval`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from trivet.config.layout import SECRET_FILE
from trivet.config.sections.base import Section
from trivet.config.sections.sampling import EnvSamplingConfig

_MAX_NAME_CHARS = 128
"""Longest name. It becomes the name of a directory, which file systems limit to 255 bytes."""


def _require_name(name: str) -> str:
    if not name.isprintable() or len(name) > _MAX_NAME_CHARS or "\\" in name or {"", ".", ".."} & set(name.split("/")):
        raise ValueError(
            f"names a directory of results: it must be printable, have at most {_MAX_NAME_CHARS} characters, and be no path "
            "that starts with / or has .. in it"
        )
    return name


def _require_variable(name: str) -> str:
    if name == SECRET_FILE or not name.isidentifier():
        raise ValueError(f"names a variable of the environment, and never {SECRET_FILE}, which holds the secret of the run")
    return name


EnvName = Annotated[str, AfterValidator(_require_name)]
VariableName = Annotated[str, AfterValidator(_require_variable)]


class EnvConfig(Section):
    """An environment: its package, its arguments, and how the policy is sampled in it."""

    id: EnvName = "reverse-text"
    """Package name of the environment."""
    name: EnvName | None = None
    """Name in logs and metrics; defaults to the id. Unique."""
    args: dict[str, Any] = {}
    """Passed to load_environment."""
    on_reward_error: Literal["drop", "zero"] = "drop"
    """A reward function that raises, or returns None: `drop` fails the group with that error, so that no bug is trained on;
    `zero` takes 0 for it, as verifiers does."""
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
        return self.id, self.args, self.on_reward_error, sorted({*self.env_vars, *self.keep_variables}), self.venv

    @property
    def label(self) -> str:
        """The environment's name in logs, metrics and file names."""
        return self.name or self.id
