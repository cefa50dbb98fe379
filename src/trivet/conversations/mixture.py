"""Mixes the conversations of one section of the configuration, and chooses the conversations of each step.

`sft` and its command call it. The choice is a function of seed and step, so a resume needs no saved state.

Legend: N counts the records of an epoch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from trivet.config.schema.sft import ConversationsConfig
from trivet.conversations.records import Conversation, read_conversation
from trivet.conversations.sources import Records, open_source
from trivet.errors import ConfigError

NUM_CHECKED_COLUMNAR = 100
"""Records of a table that are checked before the start. They are enough, because the columns of a table give all records one form.
Lines of JSON are all checked."""

MAX_DIGESTED = 20_000
"""The most records that a digest covers. Reading them takes about a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The records of one or several sources, interleaved to one epoch, which is not shuffled."""

    sources: Sequence[Records]
    names: Sequence[str]
    """The name of each source, for errors."""
    source_N: np.ndarray
    """int64: the source of each record of the epoch, as an index into `sources`."""
    record_N: np.ndarray
    """int64: the index of each record of the epoch in its source."""

    def __len__(self) -> int:
        return len(self.record_N)

    def digest(self) -> str:
        """Return one SHA-256 over the records of an epoch, in order; of a long epoch, over MAX_DIGESTED evenly spaced records."""
        digest, encoder = hashlib.sha256(), msgspec.json.Encoder(enc_hook=lambda value: type(value).__name__, order="sorted")
        for index in np.linspace(0, len(self) - 1, num=min(len(self), MAX_DIGESTED), dtype=np.int64):
            record = self.sources[int(self.source_N[index])][int(self.record_N[index])]
            digest.update(encoder.encode(record) + b"\n")
        return digest.hexdigest()

    def conversation(self, index: int) -> Conversation:
        """Return the conversation of record `index` of the epoch, from 0.

        Raises:
            ConfigError: the record has no conversation.
        """
        source, record = int(self.source_N[index]), int(self.record_N[index])
        return read_conversation(self.sources[source][record], place=f"record {record} of {self.names[source]}")


def open_data(config: ConversationsConfig, *, seed: int, key: str) -> Mixture:
    """Open every source of `config`, check its records and interleave them.

    Args:
        seed: the run's seed, used if the section has no seed of its own.
        key: the name of the section, for errors.

    Raises:
        ConfigError: a source cannot be read or reached, has no records, or has records without conversations.
    """
    splits: list[str | None] = [*config.splits] if config.splits is not None else [None] * len(config.subsets or [None])
    subsets: list[str | None] = [*config.subsets] if config.subsets is not None else [None] * len(splits)
    pairs = list(zip(subsets, splits, strict=True))
    names = [" ".join(filter(None, (config.name, *pair))) for pair in pairs]
    sources = [open_source(config.name, subset=subset, split=split, key=key) for subset, split in pairs]
    for name, records in zip(names, sources, strict=True):
        try:
            for number in range(min(len(records), NUM_CHECKED_COLUMNAR) if records.is_columnar else len(records)):
                read_conversation(records[number], place=f"record {number} of {name}")
        except ConfigError as exc:
            raise ConfigError(f"{key}.name: {exc}") from exc
    source_N, record_N = interleave(
        [len(records) for records in sources],
        probabilities=config.probabilities,
        seed=seed if config.seed is None else config.seed,
        stopping_strategy=config.stopping_strategy,
    )
    return Mixture(sources=sources, names=names, source_N=source_N, record_N=record_N)


def interleave(
    lengths: Sequence[int], *, probabilities: Sequence[float] | None, seed: int, stopping_strategy: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each record of the mixture, and its index in the source, ordered as by `datasets.interleave_datasets`.

    Args:
        lengths: the number of records of each source, at least 1.
        probabilities: the probability of each source; None: the sources alternate.
        stopping_strategy: `first_exhausted` or `all_exhausted`.
    """
    if len(lengths) == 1:
        return np.zeros(lengths[0], dtype=np.int64), np.arange(lengths[0])
    from datasets import Dataset, interleave_datasets

    numbered = [
        Dataset.from_dict({"source": np.full(length, source), "record": np.arange(length)})
        for source, length in enumerate(lengths)
    ]
    mixed = interleave_datasets(
        numbered,
        probabilities=None if probabilities is None else list(probabilities),
        seed=seed,
        stopping_strategy=stopping_strategy,  # type: ignore[reportArgumentType]  # checked by the configuration
    ).with_format("numpy")
    return np.asarray(mixed["source"][:], dtype=np.int64), np.asarray(mixed["record"][:], dtype=np.int64)


def step_indices(step: int, *, batch_size: int, num_records: int, seed: int, does_shuffle: bool) -> list[int]:
    """Return the indices of the records that a step trains on.

    Each epoch is shuffled anew, and a batch may span two epochs. The result depends only on the arguments, so a resumed run
    continues with the same records.

    Args:
        step: counted from 1.
    """
    first = (step - 1) * batch_size
    indices: list[int] = []
    for epoch in range(first // num_records, (first + batch_size - 1) // num_records + 1):
        order = np.random.default_rng(seed + epoch).permutation(num_records) if does_shuffle else np.arange(num_records)
        start = max(first - epoch * num_records, 0)
        indices += order[start : first + batch_size - epoch * num_records].tolist()
    return indices
