"""Checks several keys of supervised fine-tuning against each other. Called by `config.checks.all_checks`.

Only `data_problems` looks at files.
"""

from collections.abc import Iterator
from math import isclose
from pathlib import Path

from trivet.config.loading.dump import literal
from trivet.config.loading.findings import ROOT, Key
from trivet.config.loading.user_paths import usable_path
from trivet.config.sections.sft import ConversationsConfig, FakeDataConfig, SftConfig
from trivet.errors import ConfigError

FILE_ENDINGS = (".jsonl", ".json", ".parquet", ".arrow", ".csv")


def sft_problems(config: SftConfig) -> Iterator[str]:
    """Yield the problems of supervised fine-tuning that a trainer cannot have."""
    if isinstance(config.data, FakeDataConfig):
        if config.max_steps is None:
            yield f'{ROOT.data.type} "fake" has no end: set {ROOT.max_steps}'
    else:
        yield from _mixture_problems(config.data, ROOT.data)
    if config.val is not None:
        yield from _mixture_problems(config.val.data, ROOT.val.data)


def data_problems(config: SftConfig) -> Iterator[str]:
    """Yield a problem for each file of data that is not on this machine. Names of the hub are left to the command."""
    if config.bench is not None:
        return  # made-up rows
    if not isinstance(config.data, FakeDataConfig):
        yield from _place_problems(config.data, ROOT.data)
    if config.val is not None:
        yield from _place_problems(config.val.data, ROOT.val.data)


def looks_local(name: str) -> bool:
    """Return whether a data set's name means a file or a directory, even before it exists, and not one of the hub."""
    return name.startswith((".", "/", "~")) or name.endswith(FILE_ENDINGS) or name.count("/") > 1 or _exists(name)


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # no path: too long, or with a NUL
        return False


def _mixture_problems(config: ConversationsConfig, at: Key) -> Iterator[str]:
    subsets, splits = config.subsets, config.splits
    for key, names in (("subsets", subsets), ("splits", splits)):
        if names is not None and (not names or "" in names):
            yield f"{at[key]} must name at least one, and no name may be empty, got {literal(names)}; remove the key for all in one"
            return
    if subsets is not None and splits is not None and len(subsets) != len(splits):
        yield (
            f"{at.splits} has {len(splits)} names for {len(subsets)} {at.subsets}: {len(splits)} != {len(subsets)};"
            f" give one split for each subset, in their order"
        )
        return
    num_sources = max(len(subsets or ()), len(splits or ()), 1)
    chances = config.probabilities
    if chances is None:
        return
    if len(chances) != num_sources:
        yield (
            f"{at.probabilities} has {len(chances)} numbers for {num_sources} sources: {len(chances)} != {num_sources};"
            f" give one for each of {at.subsets} or {at.splits}, in their order"
        )
    elif min(chances) <= 0:
        yield f"{at.probabilities} must be > 0, got {literal(chances)}; remove a source that is not wanted"
    elif not isclose(sum(chances), 1.0, abs_tol=1e-6):
        scaled = ", ".join(f"{chance / sum(chances):.4g}" for chance in chances)
        yield f"{at.probabilities} must sum to 1, got {' + '.join(map(str, chances))} = {sum(chances):g}; try [{scaled}]"


def _place_problems(config: ConversationsConfig, at: Key) -> Iterator[str]:
    if not looks_local(config.name):
        return
    try:
        path = usable_path(config.name, key=str(at.name))
    except ConfigError as exc:
        yield str(exc)
        return
    if not path.exists():
        yield (
            f"{at.name} ({config.name}) does not exist: give a file (JSONL, parquet, arrow or CSV), a data set directory or a"
            f" name of the hub"
        )
    elif path.is_file() and config.subsets is not None:
        yield (
            f"{at.subsets} ({literal(config.subsets)}) exist in a directory or on the hub, and {at.name} is a file; remove"
            f" {at.subsets}"
        )
