"""The base of every configuration section: frozen, unknown keys refused, each field documented by the string under it."""

from collections.abc import Callable
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

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

    @model_validator(mode="before")
    @classmethod
    def _show_booleans(cls, data: Any) -> Any:
        """Give pydantic true and false as text where a number is wanted, so that it refuses them: it takes them for 1 and 0."""
        if not isinstance(data, dict):
            return data
        return {
            name: _as_text(value) if _holds_boolean(value) and _is_numeric(cls.model_fields.get(name)) else value
            for name, value in cast("dict[str, object]", data).items()
        }


def _holds_boolean(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_boolean, cast("dict[str, object]", value).values()))
    return isinstance(value, bool) or (isinstance(value, list) and any(map(_holds_boolean, cast("list[object]", value))))


def _as_text(value: object) -> object:
    """Return `value` with the booleans in it as TOML writes them."""
    if isinstance(value, dict):
        return {name: _as_text(item) for name, item in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [_as_text(item) for item in cast("list[object]", value)]
    return str(value).lower() if isinstance(value, bool) else value


def _is_numeric(field: FieldInfo | None) -> bool:
    """Return whether a field holds numbers, and nothing that may be a boolean."""
    scalars: set[Any] = _scalars(field.annotation) if field is not None else set()
    return not scalars.isdisjoint((int, float)) and scalars.isdisjoint((bool, Any, object))


def _scalars(annotation: Any) -> set[Any]:
    """Return the types inside `annotation` that hold no others. A section counts as one that holds anything."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {Any}
    if get_origin(annotation) is Literal:
        return {type(part) for part in get_args(annotation)}
    parts = get_args(annotation)
    if parts:
        return set[Any]().union(*map(_scalars, parts))
    return {annotation} if isinstance(annotation, type) or annotation is Any else set()


def type_or(default: str) -> Callable[[Any], str]:
    """Return the discriminator of a union of sections by their `type`. A table without one has the type `default`."""

    def type_of(value: Any) -> str:
        if isinstance(value, dict):
            return str(cast("dict[str, object]", value).get("type", default))
        return str(getattr(value, "type", default))

    return type_of
