"""What is asked of an environment's data sets."""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from trivet.wire.groups import EnvironmentInfo


def training_problem(name: str, info: EnvironmentInfo, *, hash_keys: Sequence[str]) -> str | None:
    """Why environment `name` cannot be trained on, None when it can."""
    if info.num_examples == 0:
        return f"environment {name!r} has no examples to train on; check its args, or take it out of [[orchestrator.env]]"
    if len(info.example_hashes) != info.num_examples:
        return (
            f"the data set of environment {name!r} has none of the columns orchestrator.buffer.hash_keys"
            f" ({', '.join(hash_keys)}), which name its examples; set hash_keys to columns that it has"
        )
    return None


def example_hashes(rows: Any, keys: Sequence[str]) -> list[str]:
    """SHA-256 of each row's fields `keys`; empty without keys.

    Args:
        rows: a data set of the `datasets` library.
    """
    names = [key for key in keys if key in rows.column_names]
    if not names:
        return []
    encoder = msgspec.json.Encoder(enc_hook=repr, order="sorted")
    columns = [rows[name] for name in names]
    return [hashlib.sha256(encoder.encode(row)).hexdigest() for row in zip(*columns, strict=True)]
