"""One command line to one validated configuration. Called by config.command; knows nothing of any single section."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from trivet.config.base import Section
from trivet.errors import ConfigError

SectionT = TypeVar("SectionT", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[SectionT]):
    """A configuration, where each of its values came from, and what the user should be told once."""

    config: SectionT
    origins: Mapping[str, str]
    notices: Sequence[str]


def load_config(
    kind: type[SectionT], argv: Sequence[str], *, environ: Mapping[str, str] = os.environ
) -> Loaded[SectionT]:
    values: dict[str, Any] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "@":
            values.update(tomllib.loads(Path(rest.pop(0)).read_text()))
            continue
        path = word.removeprefix("--").replace("-", "_").split(".")
        node = values
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = rest.pop(0)
    try:
        return Loaded(config=kind.model_validate(values), origins={}, notices=())
    except ValidationError as exc:
        raise ConfigError(str(exc)) from exc
