"""The base of every configuration section, and types of keys for addresses of machines.

Sections are frozen, refuse unknown keys, and document each field by the string under it.
"""

import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any, Self, Union, cast, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

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
        given = cast("dict[str, Any]", data)
        numeric = (name for name in given if name in cls.model_fields and _is_numeric(cls.model_fields[name].annotation))
        return given | {name: _with_booleans_as_text(given[name]) for name in numeric}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """Yield what is wrong between the keys of this section. The first problem is raised."""
        return iter(())


def members(annotation: Any) -> list[Any]:
    """Return the types that a union is made of, or the type itself."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for member in get_args(annotation) for inner in members(member)]
    return [annotation]


@cache
def _is_numeric(annotation: Any) -> bool:
    """Return whether a key holds numbers, alone or in a list, and nothing that may be a boolean."""
    kinds = {kind for member in members(annotation) for kind in (get_args(member) if get_origin(member) is list else (member,))}
    return bool({int, float} & kinds) and bool not in kinds


def _with_booleans_as_text(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_booleans_as_text(item) for item in cast("list[Any]", value)]
    return str(value).lower() if isinstance(value, bool) else value


def type_or(default: str) -> Callable[[Any], str]:
    """Return the discriminator of a union of sections by their `type`. A table without one has the type `default`."""

    def type_of(value: Any) -> str:
        if isinstance(value, dict):
            return str(cast("dict[str, object]", value).get("type", default))
        return str(getattr(value, "type", default))

    return type_of


def refuse_unless(is_allowed: Callable[[Any], bool], problem: str) -> AfterValidator:
    """Return a validator that refuses a value with `problem` unless it is allowed."""

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
        port = parts.port  # raises for one that is no port
    except ValueError as exc:
        raise ValueError(f"is no web address ({exc}); write it like {_EXAMPLE}") from exc
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or any(char.isspace() for char in url):
        raise ValueError(f"must start with http:// or https:// and name a host, like {_EXAMPLE}")
    if not _is_host(parts.hostname):
        raise ValueError(_NO_HOST)
    return url


Host = Annotated[str, Field(min_length=1), refuse_unless(_is_host, _NO_HOST)]
"""The name or the address of a machine or of one of its interfaces."""
WebAddress = Annotated[str, AfterValidator(_require_web_address)]
"""An address of the web: http or https, with a host."""
ServerAddress = Annotated[
    WebAddress,
    refuse_unless(
        lambda url: urlsplit(str(url)).username is None,
        "must not hold a user and password, because logs and events name servers by their addresses: send them as "
        'headers = { Authorization = "Basic ..." }, or name a variable with the key in api_key_var',
    ),
]
"""The address of a server, which logs may name: it holds no password."""
