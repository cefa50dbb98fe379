"""Section of one environment: `[[orchestrator.env]]`, `[[env]]` of `eval`."""

from typing import Any, Literal

from trivet.config.base import Section
from trivet.config.sampling import EnvSamplingConfig


class EnvConfig(Section):
    id: str = "reverse-text"
    """Package name of the environment."""
    name: str | None = None
    """Name in logs and metrics; defaults to the id. Unique."""
    args: dict[str, Any] = {}
    """Passed to load_environment."""
    on_reward_error: Literal["drop", "zero"] = "drop"
    """A reward function that raises, or returns None: `drop` fails the group with that error, so that no bug is trained on;
    `zero` takes 0 for it, as verifiers does."""
    sampling: EnvSamplingConfig = EnvSamplingConfig()

    @property
    def program(self) -> tuple[str, dict[str, Any], str]:
        """What workers are started with: those of one environment run any other of the same program."""
        return self.id, self.args, self.on_reward_error

    @property
    def label(self) -> str:
        return self.name or self.id
