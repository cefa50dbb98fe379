"""Reads a chat template that a key gives as text or as a file, by the rule of vLLM, which gets the same value."""

from pathlib import Path

from trivet.errors import ConfigError


def read_chat_template(value: str, *, key: str = "chat_template") -> str:
    """Return the Jinja template that `value` names as a file, or is itself.

    Args:
        key: the key of `value`, for the error.

    Raises:
        ConfigError: there is no such file, and the text cannot be a template.
    """
    try:
        return Path(value).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as exc:
        if any(character in value for character in "{}\n"):
            return value
        reason = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise ConfigError(
            f"{key} ({value}) is neither a template nor a file that can be read ({reason}); give the path of a Jinja"
            " file, or the template itself"
        ) from exc
