"""Checks and fingerprints the examples of an environment's data sets."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from trivet.errors import EnvironmentLoadError
from trivet.wire.groups import EnvironmentInfo

ROLLOUT_COLUMNS = ("prompt", "answer", "info", "task")
"""Columns that a rollout and its rewards see."""


def require_data(infos: Mapping[str, EnvironmentInfo], *, trained: Collection[str], hash_keys: Sequence[str]) -> None:
    """Check that the environments have examples: those in `trained` to train on, the others to evaluate on.

    Raises:
        EnvironmentLoadError: one or more have none; the message names them all.
    """
    problems: list[str] = []
    for name, info in infos.items():
        if name in trained and info.num_examples == 0:
            problems.append(
                f"environment {name!r} has no examples to train on; check its args, or take it out of [[orchestrator.env]]"
            )
        elif name in trained and len(info.example_hashes) != info.num_examples:
            problems.append(
                f"the data set of environment {name!r} has none of the columns orchestrator.buffer.hash_keys"
                f" ({', '.join(hash_keys)}), which name its examples; set hash_keys to columns that it has"
            )
        elif info.num_examples == info.num_eval_examples == 0:
            problems.append(f"environment {name!r} has no data to evaluate on; check its args")
    if problems:
        raise EnvironmentLoadError("\n- ".join(problems))


def example_hashes(dataset: Any, keys: Sequence[str]) -> list[str]:
    """Return the SHA-256 of the fields `keys` of each example; empty if the data set, of `datasets`, has none of them."""
    names = [key for key in keys if key in dataset.column_names]
    if not names:
        return []
    return hash_fields([dataset[name] for name in names])


def data_digest(dataset: Any) -> str:
    """Return the SHA-256 of everything that verifiers gives a rollout of each example of a data set, or of None, in order."""
    if dataset is None:
        return ""
    names = [name for name in ROLLOUT_COLUMNS if name in dataset.column_names]
    return digest_rows(zip(*(dataset[name] for name in names), strict=True)) if names else ""


def digest_rows(rows: Iterable[Any]) -> str:
    """Return the SHA-256 of `rows`. An object without a JSON form counts by its type: its text may hold its address."""
    digest, encoder = hashlib.sha256(), msgspec.json.Encoder(enc_hook=lambda value: type(value).__name__, order="sorted")
    for row in rows:
        digest.update(encoder.encode(row) + b"\n")
    return digest.hexdigest()


def other_data(known: EnvironmentInfo, found: EnvironmentInfo) -> str | None:
    """Say how the data of an environment differ from those known; None when they do not."""
    for what, before, now in (
        ("examples to train on", (known.num_examples, known.train_digest), (found.num_examples, found.train_digest)),
        ("examples to evaluate on", (known.num_eval_examples, known.eval_digest), (found.num_eval_examples, found.eval_digest)),
    ):
        if before[0] != now[0]:
            return f"{now[0]} {what} instead of {before[0]}"
        if before[1] and now[1] and before[1] != now[1]:
            return f"other {what}, {now[0]} as well"
    return None


def hash_fields(columns: Sequence[Sequence[Any]]) -> list[str]:
    """Return the SHA-256 of each row of `columns`."""
    encoder = msgspec.json.Encoder(enc_hook=repr, order="sorted")
    return [hashlib.sha256(encoder.encode(fields)).hexdigest() for fields in zip(*columns, strict=True)]
