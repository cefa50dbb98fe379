"""Hides secrets wherever a configuration is only displayed: in pages, dry runs, logs and errors. Roles read the true values.

Whether a value is hidden depends on the name of its key and on the tables that hold it. The value counts in three cases: a number
may be a count, nothing hides in an empty value or a boolean, and an address may hold a password or a secret in its query.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from trivet.config.tables import as_list, as_table

HIDDEN = "(not shown: it may be a secret)"
_STARS = "***"
"""Replaces a secret inside an address, where HIDDEN would not fit."""
_SECRET = re.compile(r"key|token|secret|passw|pwd|auth|cookie|credential|bearer|signature", re.IGNORECASE)
_HARMLESS = re.compile(r"tokenizer|hash_keys|api_key_var|author(?!i)|(?:max|min|micro_batch|no_loss)_tokens", re.IGNORECASE)
"""Parts of names that match `_SECRET` although their values are no secrets."""
_COUNTED = re.compile(r"tokens|token_(?:id|mask|count|limit|budget|ratio|len)", re.IGNORECASE)
"""Names with `token` whose value, if it is a number, is a count and no secret."""
_PASSWORD_IN_ADDRESS = re.compile(r"(?<=://)[^/?#\s]*@")
"""`user:password@` in `https://user:password@host/path`."""
_SECRET_IN_QUERY = re.compile(rf"([?&][^=&#\s]*(?:{_SECRET.pattern})[^=&#\s]*=)[^&#\s]+", re.IGNORECASE)
_PATH_OF_ADDRESS = re.compile(r"(?<=[^/:]/).+", re.DOTALL)
"""`path` in `https://host/path`."""
_HEADERS = "headers"
"""The end of the name of a table of HTTP headers. Every value in it is hidden, because any header may carry a secret."""
_HEARTBEAT = ("heartbeat", "url")
"""The path of this address is a secret: anyone who has it can send heartbeats."""
_MIN_SECRET_CHARS = 4
"""Shorter secrets are not replaced in texts, because too many words contain them."""


def mask(path: Sequence[str | int], value: object) -> object:
    """Return the value of the key `path` with secrets hidden. Masking a second time changes nothing."""
    names = [str(part) for part in path]
    if (table := as_table(value)) is not None:
        return {name: mask((*path, name), item) for name, item in table.items()}
    if (items := as_list(value)) is not None:
        return [mask(path, item) for item in items]
    if value is None or isinstance(value, bool) or value == "":
        return value
    is_number = isinstance(value, int | float)
    secrets = (name for name in names if names_secret(name) and not (is_number and _COUNTED.search(name)))
    if any(secrets) or any(name.lower().endswith(_HEADERS) for name in names[:-1]):
        return HIDDEN
    if not isinstance(value, str):
        return value
    shown = hide_in_addresses(value)
    if tuple(names[-2:]) != _HEARTBEAT:
        return shown
    return _PATH_OF_ADDRESS.sub(HIDDEN, shown) if "://" in shown else HIDDEN


def names_secret(name: str) -> bool:
    """Return whether an environment variable or a key of this name may hold a secret."""
    return _SECRET.search(_HARMLESS.sub("", name)) is not None


def mask_table(table: Mapping[str, object]) -> dict[str, object]:
    """Return `table` with every value masked, also in nested tables and lists."""
    return {name: mask((name,), value) for name, value in table.items()}


def hide_in_addresses(text: str) -> str:
    """Return `text` without the passwords of the addresses in it."""
    return _SECRET_IN_QUERY.sub(rf"\1{_STARS}", _PASSWORD_IN_ADDRESS.sub(f"{_STARS}@", text))


def hide_values(text: str, table: Mapping[str, object]) -> str:
    """Return `text` without the secret values of `table`. Code that can read `table` wrote the text, so it may contain them."""
    pairs = zip(_scalars(mask_table(table)), _scalars(table), strict=True)
    secrets = {str(value) for shown, value in pairs if shown == HIDDEN and len(str(value)) >= _MIN_SECRET_CHARS}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return hide_in_addresses(text)


def _scalars(value: object) -> Iterator[object]:
    """Yield every value inside `value` that is neither a table nor a list."""
    table, items = as_table(value), as_list(value)
    if table is None and items is None:
        yield value
    for item in table.values() if table is not None else items or ():
        yield from _scalars(item)
