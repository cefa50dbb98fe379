"""The tokens of a step's rollouts on disk, compact: written by the orchestrator beside `rollouts.jsonl`, read by `trivet view`.

The file is one MessagePack array with an entry for each line of `rollouts.jsonl`, in its order, compressed by zlib. Nothing reads
it back into a run. Legend: T tokens of one sample, S those of them that the model sampled.
"""

import zlib
from collections.abc import Iterable

import msgspec
import numpy as np

from trivet.errors import MessageRefused
from trivet.wire.rollouts import Rollout, Sample
from trivet.wire.versions import VersionRun

TOKENS_FILE = "tokens.msgpack.z"
_LEVEL = 1
"""Compression level of zlib: higher ones save another tenth and cost several times the time."""
MAX_UNPACKED_BYTES = 1 << 30
"""A step of a hundred million tokens; a damaged or hostile file does not fill the memory of who reads it."""


class SampleTokens(msgspec.Struct, kw_only=True, array_like=True):
    """One sample as four byte strings, each in the order of the tokens."""

    token_ids: bytes
    """int32 [T], little-endian."""
    is_sampled: bytes
    """bool [T]: one bit each, the first token in the highest bit of the first byte."""
    logprobs: bytes
    """float16 [S], little-endian: exact to three digits, which is what a colour can show."""
    versions: list[VersionRun]
    """Policy of each sampled token."""


class Tokens(msgspec.Struct, kw_only=True):
    """The arrays that a `SampleTokens` holds."""

    token_ids_T: np.ndarray
    is_sampled_T: np.ndarray
    logprobs_S: np.ndarray
    versions: list[VersionRun]


def pack_tokens(rollouts: Iterable[Rollout]) -> bytes:
    """Return the content of the file."""
    return zlib.compress(
        msgspec.msgpack.encode([[_pack(sample) for sample in rollout.samples] for rollout in rollouts]), _LEVEL
    )


def unpack_tokens(data: bytes) -> list[list[Tokens]]:
    """Return the samples of each rollout.

    Raises:
        MessageRefused: `data` is not what `pack_tokens` wrote.
    """
    try:
        unzip = zlib.decompressobj()
        unpacked = unzip.decompress(data, MAX_UNPACKED_BYTES)
        if not unzip.eof:
            raise ValueError(f"it ends early, or holds more than {MAX_UNPACKED_BYTES} bytes")
        rollouts = msgspec.msgpack.decode(unpacked, type=list[list[SampleTokens]])
        return [[_unpack(sample) for sample in samples] for samples in rollouts]
    except (zlib.error, msgspec.DecodeError, ValueError) as exc:
        raise MessageRefused(f"{TOKENS_FILE} cannot be read: {exc}") from exc


def _pack(sample: Sample) -> SampleTokens:
    return SampleTokens(
        token_ids=sample.token_ids_T.astype("<i4").tobytes(),
        is_sampled=np.packbits(sample.loss_mask_T).tobytes(),
        logprobs=sample.logprobs_T[sample.loss_mask_T].astype("<f2").tobytes(),
        versions=sample.versions,
    )


def _unpack(sample: SampleTokens) -> Tokens:
    token_ids_T = np.frombuffer(sample.token_ids, dtype="<i4")
    is_sampled_T = np.unpackbits(np.frombuffer(sample.is_sampled, dtype=np.uint8), count=len(token_ids_T)).astype(bool)
    logprobs_S = np.frombuffer(sample.logprobs, dtype="<f2").astype(np.float32)
    if np.count_nonzero(is_sampled_T) != len(logprobs_S):
        raise ValueError(f"{np.count_nonzero(is_sampled_T)} sampled tokens, {len(logprobs_S)} log-probabilities")
    return Tokens(token_ids_T=token_ids_T, is_sampled_T=is_sampled_T, logprobs_S=logprobs_S, versions=sample.versions)
