"""Encodes the tokens of a step's rollouts for one compact file. `trivet view` reads it; a resumed run does not need it.

The orchestrator writes the file next to `rollouts.jsonl`. It is one MessagePack array compressed with zlib: entry i has the
samples of the rollout in line i of `rollouts.jsonl`. Legend: T tokens of one sample, N of them that the
policy sampled.
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
"""Compression level of zlib. Higher levels make the file a tenth smaller and take several times as long."""
MAX_UNPACKED_BYTES = 1 << 30
"""Limit in bytes, enough for a step of 10^8 tokens. It keeps a damaged or hostile file from filling the reader's memory."""


class SampleTokens(msgspec.Struct, kw_only=True, array_like=True):
    """One sample as it is encoded in the file; every array is in the order of the tokens."""

    token_ids: bytes
    """int32 [T], little-endian."""
    is_sampled: bytes
    """bool [T]: one bit per token, the first token in the highest bit of the first byte. In files of versions that had no
    `is_masked` it is the loss mask, which is empty in a masked sample."""
    logprobs: bytes
    """float16 [N], little-endian. Its three digits are enough for the colours of tokens in `trivet view`."""
    versions: list[VersionRun]
    """Policy version of each sampled token, encoded by run length."""
    is_masked: bool = False
    """A filter masked the sample from the loss."""


class Tokens(msgspec.Struct, kw_only=True):
    """One sample, decoded from `SampleTokens`."""

    token_ids_T: np.ndarray
    is_sampled_T: np.ndarray
    logprobs_N: np.ndarray
    versions: list[VersionRun]
    is_masked: bool


def pack_tokens(rollouts: Iterable[Rollout]) -> bytes:
    """Return the content of the file for `rollouts`, which are in the order of `rollouts.jsonl`."""
    return zlib.compress(
        msgspec.msgpack.encode([[_pack(sample) for sample in rollout.samples] for rollout in rollouts]), _LEVEL
    )


def unpack_tokens(data: bytes) -> list[list[Tokens]]:
    """Decode the content of the file; return the samples of each rollout.

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
    sampled = sample.masked or sample
    return SampleTokens(
        token_ids=sample.token_ids_T.astype("<i4").tobytes(),
        is_sampled=np.packbits(sampled.loss_mask_T).tobytes(),
        logprobs=sampled.logprobs_T[sampled.loss_mask_T].astype("<f2").tobytes(),
        versions=sample.versions,
        is_masked=sample.masked is not None,
    )


def _unpack(sample: SampleTokens) -> Tokens:
    token_ids_T = np.frombuffer(sample.token_ids, dtype="<i4")
    is_sampled_T = np.unpackbits(np.frombuffer(sample.is_sampled, dtype=np.uint8), count=len(token_ids_T)).astype(bool)
    logprobs_N = np.frombuffer(sample.logprobs, dtype="<f2").astype(np.float32)
    if np.count_nonzero(is_sampled_T) != len(logprobs_N):
        raise ValueError(f"{np.count_nonzero(is_sampled_T)} sampled tokens, {len(logprobs_N)} log-probabilities")
    return Tokens(
        token_ids_T=token_ids_T,
        is_sampled_T=is_sampled_T,
        logprobs_N=logprobs_N,
        versions=sample.versions,
        is_masked=sample.is_masked,
    )
