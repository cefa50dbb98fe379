"""All the conversations of one section of the configuration, and which of them a step takes. Called by `sft` and its command.

What a step takes is a function of seed and step, so nothing is saved for a resume.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trivet.config.sections.sft import ConversationsConfig
from trivet.conversations.rows import Conversation, read_row
from trivet.conversations.sources import Rows, open_source
from trivet.errors import ConfigError

NUM_CHECKED_COLUMNAR = 100
"""Rows looked at before the start where a table's columns make all rows alike. Lines of JSON are all looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Rows of one or several sources, interleaved: one epoch, before it is shuffled.

    >>> data = open_data(config.data, seed=config.seed, key="data")
    >>> data.conversation(step_indices(1, batch_size=8, num_rows=len(data), seed=0, does_shuffle=True)[0])
    """

    sources: Sequence[Rows]
    names: Sequence[str]
    source_N: np.ndarray
    """int64: of each row of the epoch its source."""
    row_N: np.ndarray
    """int64: its number there."""

    def __len__(self) -> int:
        return len(self.row_N)

    def conversation(self, index: int) -> Conversation:
        """
        Raises:
            ConfigError: the row has none.
        """
        source, row = int(self.source_N[index]), int(self.row_N[index])
        return read_row(self.sources[source][row], place=f"row {row} of {self.names[source]}")


def open_data(config: ConversationsConfig, *, seed: int, key: str) -> Mixture:
    """
    Args:
        seed: the run's, for a section without its own.
        key: section of the configuration, for errors.

    Raises:
        ConfigError: a source cannot be read or reached, has no rows, or has rows without conversations.
    """
    splits: list[str | None] = [*config.splits] if config.splits is not None else [None] * len(config.subsets or [None])
    subsets: list[str | None] = [*config.subsets] if config.subsets is not None else [None] * len(splits)
    places = list(zip(subsets, splits, strict=True))
    names = [" ".join(filter(None, (config.name, *place))) for place in places]
    sources = [open_source(config.name, subset=subset, split=split, key=key) for subset, split in places]
    for name, rows in zip(names, sources, strict=True):
        _check(rows, name, key=key)
    source_N, row_N = interleave(
        [len(rows) for rows in sources],
        probabilities=config.probabilities,
        seed=seed if config.seed is None else config.seed,
        stopping_strategy=config.stopping_strategy,
    )
    return Mixture(sources=sources, names=names, source_N=source_N, row_N=row_N)


def interleave(
    lengths: Sequence[int], *, probabilities: Sequence[float] | None, seed: int, stopping_strategy: str
) -> tuple[np.ndarray, np.ndarray]:
    """Source and row of each place of the mixture, as `datasets.interleave_datasets` has it.

    Args:
        lengths: rows of each source, at least 1.
        probabilities: of each source; None: they take turns.
        stopping_strategy: `first_exhausted` or `all_exhausted`.
    """
    if len(lengths) == 1:
        return np.zeros(lengths[0], dtype=np.int64), np.arange(lengths[0])
    from datasets import Dataset, interleave_datasets

    numbered = [
        Dataset.from_dict({"source": np.full(length, source), "row": np.arange(length)})
        for source, length in enumerate(lengths)
    ]
    mixed = interleave_datasets(
        numbered,
        probabilities=None if probabilities is None else list(probabilities),
        seed=seed,
        stopping_strategy=stopping_strategy,  # type: ignore[reportArgumentType]  # checked by the configuration
    ).with_format("numpy")
    return np.asarray(mixed["source"][:], dtype=np.int64), np.asarray(mixed["row"][:], dtype=np.int64)


def step_indices(step: int, *, batch_size: int, num_rows: int, seed: int, does_shuffle: bool) -> list[int]:
    """Which rows step `step`, from 1, trains on. Each epoch has an order of its own; a batch may span two.

    A function of its arguments alone, so a resumed run goes on where it stopped.
    """
    first = (step - 1) * batch_size
    indices: list[int] = []
    for epoch in range(first // num_rows, (first + batch_size - 1) // num_rows + 1):
        order = np.random.default_rng(seed + epoch).permutation(num_rows) if does_shuffle else np.arange(num_rows)
        start = max(first - epoch * num_rows, 0)
        indices += order[start : first + batch_size - epoch * num_rows].tolist()
    return indices


def _check(rows: Rows, name: str, *, key: str) -> None:
    try:
        for number in range(len(rows) if not getattr(rows, "is_columnar", False) else min(len(rows), NUM_CHECKED_COLUMNAR)):
            read_row(rows[number], place=f"row {number} of {name}")
    except ConfigError as exc:
        raise ConfigError(f"{key}.name: {exc}") from exc
