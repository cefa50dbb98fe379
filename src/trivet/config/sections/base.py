"""The base of every configuration section: frozen, unknown keys refused, each field documented by the string under it."""

from collections.abc import Callable
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

MAX_TOKENS = 2**24
"""Upper bound of lengths: longer than the context of any model."""
MAX_ROLLOUTS = 2**20
"""Upper bound of what is counted in rollouts, rows or requests of one moment."""
MAX_PROCESSES = 4096
"""Upper bound of processes of one kind."""
MAX_WAIT_S = 1e6
"""Upper bound of waits, eleven days: the kernel's poll waits at most 24."""


class Section(BaseModel):
    """A table of keys. Subclasses are the sections of a configuration; their docstrings are shown to users."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


def type_or(default: str) -> Callable[[Any], str]:
    """Return the discriminator of a union of sections by their `type`. A table without one has the type `default`."""

    def type_of(value: Any) -> str:
        if isinstance(value, dict):
            return str(cast("dict[str, object]", value).get("type", default))
        return str(getattr(value, "type", default))

    return type_of
