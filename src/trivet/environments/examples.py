"""Checks and fingerprints the examples of an environment's data sets."""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from trivet.wire.groups import EnvironmentInfo


def training_problem(name: str, info: EnvironmentInfo, *, hash_keys: Sequence[str]) -> str | None:
    """Return why environment `name` cannot be trained on; None when it can."""
    if info.num_examples == 0:
        return f"environment {name!r} has no examples to train on; check its args, or take it out of [[orchestrator.env]]"
    if len(info.example_hashes) != info.num_examples:
        return (
            f"the data set of environment {name!r} has none of the columns orchestrator.buffer.hash_keys"
            f" ({', '.join(hash_keys)}), which name its examples; set hash_keys to columns that it has"
        )
    return None


def example_hashes(dataset: Any, keys: Sequence[str]) -> list[str]:
    """Return the SHA-256 of the fields `keys` of each example; empty if the data set has none of them.

    Args:
        dataset: a data set of the `datasets` library.
    """
    names = [key for key in keys if key in dataset.column_names]
    if not names:
        return []
    return hash_fields([dataset[name] for name in names])


def hash_fields(columns: Sequence[Sequence[Any]]) -> list[str]:
    """Return the SHA-256 of each row of `columns`."""
    encoder = msgspec.json.Encoder(enc_hook=repr, order="sorted")
    return [hashlib.sha256(encoder.encode(fields)).hexdigest() for fields in zip(*columns, strict=True)]
