"""Checks and fingerprints the examples of an environment's data sets."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from trivet.errors import EnvironmentLoadError
from trivet.wire.groups import EnvironmentInfo

ROLLOUT_COLUMNS = ("prompt", "answer", "info", "task")
"""The columns of a data set that a rollout and its rewards use."""


def require_data(infos: Mapping[str, EnvironmentInfo], *, trained: Collection[str], hash_keys: Sequence[str]) -> None:
    """Check that the environments have examples: those in `trained` to train on, the others to evaluate on.

    Raises:
        EnvironmentLoadError: environments have none; the message names all of them.
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
    """Return the SHA-256 of the fields `keys` of each example; empty if the data set (a `datasets.Dataset`) has none of them."""
    names = [key for key in keys if key in dataset.column_names]
    if not names:
        return []
    return hash_fields([dataset[name] for name in names])


def data_digest(dataset: Any) -> str:
    """Return one SHA-256 over the rollout columns of all examples, in order; empty without a data set or without such columns."""
    if dataset is None:
        return ""
    names = [name for name in ROLLOUT_COLUMNS if name in dataset.column_names]
    return digest_records(zip(*(dataset[name] for name in names), strict=True)) if names else ""


def digest_records(records: Iterable[Any]) -> str:
    """Return one SHA-256 over all `records`, in order.

    For an object without a JSON form the name of its type is hashed: its text may hold its address in memory.
    """
    digest, encoder = hashlib.sha256(), msgspec.json.Encoder(enc_hook=lambda value: type(value).__name__, order="sorted")
    for record in records:
        digest.update(encoder.encode(record) + b"\n")
    return digest.hexdigest()


def describe_difference(first: EnvironmentInfo, other: EnvironmentInfo) -> str | None:
    """Describe how the data in `other` differ from those in `first`; None when they are equal. An empty digest is not compared."""
    for name, expected, found in (
        ("examples to train on", (first.num_examples, first.train_digest), (other.num_examples, other.train_digest)),
        ("examples to evaluate on", (first.num_eval_examples, first.eval_digest), (other.num_eval_examples, other.eval_digest)),
    ):
        if expected[0] != found[0]:
            return f"{found[0]} {name} instead of {expected[0]}"
        if expected[1] and found[1] and expected[1] != found[1]:
            return f"other {name}, {found[0]} as well"
    return None


def hash_fields(columns: Sequence[Sequence[Any]]) -> list[str]:
    """Return a SHA-256 for each example, over its values in `columns`. Each column has one value per example."""
    encoder = msgspec.json.Encoder(enc_hook=repr, order="sorted")
    return [hashlib.sha256(encoder.encode(fields)).hexdigest() for fields in zip(*columns, strict=True)]
