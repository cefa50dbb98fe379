"""The base of every configuration section, and types of keys for addresses of machines.

Sections are frozen, refuse unknown keys, and document each field by the string under it.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, cast, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
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


_EXAMPLE = "http://127.0.0.1:8000/v1"


def _require_web_address(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port  # raises for one that is no port
    except ValueError as exc:
        raise ValueError(f"is no web address ({exc}); write it like {_EXAMPLE}") from exc
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or any(char.isspace() for char in url):
        raise ValueError(f"must start with http:// or https:// and name a host, like {_EXAMPLE}")
    _require_host(parts.hostname)
    return url


def _require_no_password(url: str) -> str:
    if urlsplit(url).username is not None:
        raise ValueError(
            "must not hold a user and password, because logs and events name servers by their addresses: send them as "
            'headers = { Authorization = "Basic ..." }, or name a variable with the key in api_key_var'
        )
    return url


def _require_host(host: str) -> str:
    try:
        is_sound = bool(host) and host.isprintable() and "\0" not in host and bool(host.encode("idna"))
    except UnicodeError:
        is_sound = False
    if not is_sound:
        raise ValueError("is no name or address of a machine")
    return host


WebAddress = Annotated[str, AfterValidator(_require_web_address)]
"""An address of the web: http or https, with a host."""
ServerAddress = Annotated[WebAddress, AfterValidator(_require_no_password)]
"""The address of a server, which logs may name: it holds no password."""
Host = Annotated[str, Field(min_length=1), AfterValidator(_require_host)]
"""The name or the address of a machine or of one of its interfaces."""
