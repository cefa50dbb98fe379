"""The base class of every configuration section, and types of keys that hold addresses of machines.

Sections are frozen, refuse unknown keys, and document each field by the string under it, which `--help` shows to users.
"""

import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any, Self, Union, cast, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MAX_TOKENS = 2**24
"""Upper bound of lengths in tokens. No model has a longer context."""
MAX_ROLLOUTS = 2**20
"""Upper bound of numbers of rollouts, rows or simultaneous requests."""
MAX_PROCESSES = 4096
"""Upper bound of the number of processes of one kind."""
MAX_WAIT_S = 1e6
"""Upper bound of waits in seconds, eleven days. A poll of the kernel can wait for 24 days at most."""


class Section(BaseModel):
    """A table of keys. Subclasses are the sections of a configuration; their docstrings are shown to users."""

    model_config = ConfigDict(
        frozen=True,
        defer_build=True,
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans_as_numbers(cls, data: Any) -> Any:
        """Convert true and false to text for keys that hold numbers. pydantic then refuses them; else it takes them as 1 and 0."""
        if not isinstance(data, dict):
            return data
        values = cast("dict[str, Any]", data)
        numeric = (name for name in values if name in cls.model_fields and _is_numeric(cls.model_fields[name].annotation))
        return values | {name: _with_booleans_as_text(values[name]) for name in numeric}

    @model_validator(mode="after")
    def _require_consistency(self) -> Self:
        """Raise the first problem between the keys of this section."""
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """Yield the problems between the keys of this section. Subclasses override it."""
        return iter(())


def union_members(annotation: Any) -> list[Any]:
    """Return the types in a union, also in nested ones; for another type a list with the type itself."""
    if get_origin(annotation) is Annotated:
        return union_members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for member in get_args(annotation) for inner in union_members(member)]
    return [annotation]


@cache
def _is_numeric(annotation: Any) -> bool:
    """Return whether a key holds a number or a list of numbers, and cannot hold a boolean."""
    kinds = {
        kind for member in union_members(annotation) for kind in (get_args(member) if get_origin(member) is list else (member,))
    }
    return bool({int, float} & kinds) and bool not in kinds


def _with_booleans_as_text(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_booleans_as_text(item) for item in cast("list[Any]", value)]
    return str(value).lower() if isinstance(value, bool) else value


def type_or(default: str) -> Callable[[Any], str]:
    """Return the discriminator of a union of sections, a function that returns the `type` of a table, by default `default`."""

    def type_of(value: Any) -> str:
        if isinstance(value, dict):
            return str(cast("dict[str, object]", value).get("type", default))
        return str(getattr(value, "type", default))

    return type_of


def refuse_unless(is_allowed: Callable[[Any], bool], problem: str) -> AfterValidator:
    """Return a validator that raises a ValueError with the text `problem` for values that are not allowed."""

    def validate(value: Any) -> Any:
        if not is_allowed(value):
            raise ValueError(problem)
        return value

    return AfterValidator(validate)


_EXAMPLE = "http://127.0.0.1:8000/v1"
_NO_HOST = "is no name or address of a machine"


def _is_host(name: str) -> bool:
    try:
        return name.isprintable() and bool(name.encode("idna"))
    except UnicodeError:
        return False


def _require_web_address(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port  # raises ValueError if it is no port
    except ValueError as exc:
        raise ValueError(f"is no web address ({exc}); write it like {_EXAMPLE}") from exc
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or any(char.isspace() for char in url):
        raise ValueError(f"must start with http:// or https:// and name a host, like {_EXAMPLE}")
    if not _is_host(parts.hostname):
        raise ValueError(_NO_HOST)
    return url


Host = Annotated[str, Field(min_length=1), refuse_unless(_is_host, _NO_HOST)]
"""The name or the address of a machine, or of one of its network interfaces."""
WebAddress = Annotated[str, AfterValidator(_require_web_address)]
"""A URL with http or https and a host."""
ServerAddress = Annotated[
    WebAddress,
    refuse_unless(
        lambda url: urlsplit(str(url)).username is None,
        "must not hold a user and password, because logs and events name servers by their addresses: send them as "
        'headers = { Authorization = "Basic ..." }, or name a variable with the key in api_key_var',
    ),
]
"""The URL of a server. It contains no password, because logs may show it."""
