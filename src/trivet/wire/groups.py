"""Defines what the orchestrator asks of an environment, and what it learns about one. Crosses to environment workers."""

from enum import StrEnum
from typing import Any

import msgspec

from trivet.wire.rollouts import GroupId


class Split(StrEnum):
    """Names a data set of an environment."""

    TRAIN = "train"
    EVAL = "eval"


class SamplingArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Fixes how the tokens of a group are sampled, when the group starts."""

    temperature: float | None
    """Temperature; None: the server's default, only where nothing is trained."""
    seed: int | None = None
    """Each request's own seed is derived from it, the group id and the rollout's index; None: not reproducible."""
    fields: dict[str, Any] = {}
    """Further fields of a chat-completions request."""


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Run `num_rollouts` rollouts of one example on one server and score them together."""

    group_id: GroupId
    env: str
    """The environment's `name` in the configuration."""
    split: Split = Split.TRAIN
    example_id: int
    """Row in the data set of `split`."""
    num_rollouts: int
    base_url: str
    """The inference server that all its model requests go to."""
    sampling: SamplingArguments


class EnvironmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a loaded environment."""

    num_examples: int
    """Rows of the data set that is trained on."""
    num_eval_examples: int = 0
    """Rows of its own evaluation data set; 0 when it has none."""
    example_hashes: list[str] = []
    """SHA-256 of each training example over `buffer.hash_keys`, by row: names an example when the data set changes."""
