"""Writes and applies deltas: files that hold what changed from one published policy, the base, to the next.

Each file is divided into chunks. A chunk is stored as the differences of its values: new bits minus old bits, as unsigned integers
that wrap. An optimizer step moves most values by few units in the last place, so differences take far fewer bytes than values, even
where all values changed. On another base they give other bytes. So a delta is applied to a copy, and the result compared with the
digests of the published files. `weights.publish` writes deltas, `weights.fetch` applies them.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from trivet.errors import WeightsError
from trivet.storage.durable import DECODE_ERRORS, FileRecord, digest_of
from trivet.weights.manifest import Manifest

MAX_DELTA_SHARE = 0.6
"""Share of a policy's bytes above which deltas are given up: with more, the time saved is little, and a CPU's is spent."""
_MAGIC = b"trivet delta 1\n\0"
_TAIL_BYTES = 8 + 16 + len(_MAGIC)
"""The end of a delta: size and digest of its index, and the name of the format."""
_CHUNK_BYTES = 2 << 20
"""Bytes of a chunk, part of the format. The arrays of a chunk then fit the processor's cache."""
_MAX_SPARSE_SHARE = 0.4
"""Above this share of changed values, also part of the format, positions take more bytes than zeros for unchanged values."""
_NUM_THREADS = min(4, os.cpu_count() or 1)
"""Enough for 1 GB of weights in a second. More would take the processor from training."""
_WIDTHS = {"BF16": 2, "F16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8}
"""Bytes of a value by its dtype in safetensors. Values of other dtypes are treated as bytes."""


class DeltaIndex(msgspec.Struct, frozen=True):
    """The last part of a delta: what it applies to, what it makes, and the chunks of each file."""

    base_digest: str
    records: dict[str, FileRecord]
    """The files of the resulting policy. Those of the base have the same names and sizes."""
    widths: dict[str, int]
    """Bytes of a value of each file."""
    chunks: dict[str, list[tuple[int, int, int]]]
    """The number of changed values of each chunk of each file, and position and size of its compressed bytes in the delta. None
    are stored if no value changed; positions and differences if few did; else the differences of all values."""

    def changed_share(self) -> float:
        """Return the share of the values that changed."""
        num_changed = sum(num_changed for chunks in self.chunks.values() for num_changed, _, _ in chunks)
        return num_changed / max(1.0, sum(self.records[name].num_bytes / width for name, width in self.widths.items()))


def write_delta(base: Path, directory: Path, path: Path, *, old: Manifest, new: Manifest) -> DeltaIndex:
    """Write to `path` the delta from policy `old` in `base` to policy `new` in `directory`, in memory that does not grow with them.

    Raises OSError or WeightsError if a file cannot be read or written, if files have other names or sizes, or if the delta would be
    too large. Part of it is left in `path`.
    """
    if {name: record.num_bytes for name, record in old.files.items()} != {
        n: record.num_bytes for n, record in new.files.items()
    }:
        raise WeightsError(f"{directory} has other files than {base}, or files of other sizes")
    index = DeltaIndex(old.digest, new.files, {}, {})
    with path.open("wb") as out:
        for name, record in new.files.items():
            with (base / name).open("rb") as base_file, (directory / name).open("rb") as file, ExitStack() as stack:
                width, chunks = _find_width(file, record.num_bytes), list[tuple[int, int, int]]()
                index.widths[name], index.chunks[name] = width, chunks
                encode = partial(_encode, base_file, file, width)
                for num_changed, stored in _map_in_order(encode, _divide(record.num_bytes), stack):
                    chunks.append((num_changed, out.tell(), len(stored)))
                    out.write(stored)
                    if out.tell() > MAX_DELTA_SHARE * new.num_bytes:
                        raise WeightsError(f"it would have more than {MAX_DELTA_SHARE:.0%} of the policy's bytes")
        encoded = msgspec.msgpack.encode(index)
        out.write(encoded + len(encoded).to_bytes(8, "little") + xxhash.xxh3_128_digest(encoded) + _MAGIC)
    return index


def read_index(path: Path) -> DeltaIndex:
    """Return the index of a delta. Raises WeightsError if the file is no delta, is incomplete, or its index was altered."""
    try:
        with path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size - _TAIL_BYTES
            tail = _read(file, max(0, end), _TAIL_BYTES)
            start = end - int.from_bytes(tail[:8], "little")
            encoded = _read(file, start, end - start) if start >= 0 else b""
        if tail[24:] != _MAGIC or xxhash.xxh3_128_digest(encoded) != tail[8:24]:
            raise WeightsError(f"{path} is no delta of this format, or was altered")
        return msgspec.msgpack.decode(encoded, type=DeltaIndex)
    except (OSError, *DECODE_ERRORS) as exc:
        raise WeightsError(f"{path} cannot be read: {exc}") from exc


def apply_deltas(paths: Sequence[Path], base: Path, directory: Path, *, base_digest: str, manifest: Manifest) -> None:
    """Make the files of policy `manifest` in `directory` from the policy in `base`, and compare their digests.

    Args:
        paths: deltas, each of which applies to the result of the one before it.
        base_digest: the digest of the policy in `base`. Its files are not verified: other bytes would not give the result.

    Raises:
        WeightsError: the deltas do not lead from that base to that policy, or a file was altered. Part of the policy is left.
    """
    indexes = [read_index(path) for path in paths]
    digests = [base_digest, *(digest_of(index.records) for index in indexes)]
    if [index.base_digest for index in indexes] != digests[:-1] or indexes[-1].records != manifest.files:
        raise WeightsError(f"{paths[-1]} does not lead from policy {base_digest[:12]} to policy {manifest.digest[:12]}")
    try:
        for name, record in manifest.files.items():
            digest = xxhash.xxh3_128()
            with (base / name).open("rb") as base_file, (directory / name).open("xb") as out, ExitStack() as stack:
                deltas = [(stack.enter_context(path.open("rb")), index) for path, index in zip(paths, indexes, strict=True)]
                places = zip(_divide(record.num_bytes), *(index.chunks[name] for index in indexes), strict=True)
                decode = partial(_decode, base_file, [(file, index.widths[name]) for file, index in deltas])
                for content in _map_in_order(decode, places, stack):
                    out.write(content)
                    digest.update(content)
                if FileRecord(out.tell(), digest.hexdigest()) != record:
                    raise WeightsError(f"{base / name} or {paths[-1]} was altered: they do not give the published file")
    except (OSError, ValueError, LookupError) as exc:  # altered bytes are not zstd, or give other positions
        raise WeightsError(f"{paths[-1]} cannot be applied to {base}: {exc}") from exc


def _map_in_order(function: Callable[[Any], Any], items: Iterable[object], stack: ExitStack) -> Iterator[Any]:
    """Yield the results for `items`, in order, from threads that are a few items ahead and end before `stack` closes files."""
    executor = stack.enter_context(ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="delta"))
    pending: deque[Future[Any]] = deque()
    for item in items:
        pending.append(executor.submit(function, item))
        if len(pending) > 2 * _NUM_THREADS:
            yield pending.popleft().result()
    yield from (future.result() for future in pending)


def _divide(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and size of each chunk of a file."""
    return ((start, min(_CHUNK_BYTES, num_bytes - start)) for start in range(0, num_bytes, _CHUNK_BYTES))


def _find_width(file: BinaryIO, num_bytes: int) -> int:
    """Return the bytes of a value in most tensors of a safetensors file, and 1 for other files. It affects compression alone."""
    try:
        header: dict[str, Any] = json.loads(_read(file, 8, min(int.from_bytes(_read(file, 0, 8), "little"), num_bytes)))
        dtypes = [entry["dtype"] for name, entry in header.items() if name != "__metadata__"]
        width = _WIDTHS.get(max(set(dtypes), key=dtypes.count), 1)
    except (WeightsError, ValueError, TypeError, LookupError, AttributeError):
        return 1
    return width if num_bytes % width == 0 else 1


def _encode(base: BinaryIO, file: BinaryIO, width: int, place: tuple[int, int]) -> tuple[int, bytes]:
    """Return the number of changed values of a chunk, and its compressed differences."""
    new = np.frombuffer(_read(file, *place), f"u{width}")
    differences = new - np.frombuffer(_read(base, *place), new.dtype)
    num_changed = int(np.count_nonzero(differences))
    if not num_changed:
        return 0, b""
    payload = b""
    if num_changed <= _MAX_SPARSE_SHARE * len(differences):
        positions = np.flatnonzero(differences != 0)  # of booleans: three times as fast as of integers
        payload = _split_bytes(np.diff(positions, prepend=-1).astype(np.uint32))
        differences = differences[positions]
    # Zigzag order 0, -1, 1, -2 …: small differences of both signs have zeros in their upper bytes.
    signed = differences.view(f"i{width}")
    payload += _split_bytes(((signed << 1) ^ (signed >> (8 * width - 1))).view(new.dtype))
    return num_changed, _codec().compress(payload, asbytes=True)


def _decode(
    base: BinaryIO, deltas: Sequence[tuple[BinaryIO, int]], item: tuple[tuple[int, int], *tuple[tuple[int, int, int], ...]]
) -> bytes:
    """Return the bytes of a chunk after all deltas, each a file with the width of its values."""
    place, *chunks = item
    content = bytearray(_read(base, *place))
    for (file, width), (n, first_byte, num_bytes) in zip(deltas, chunks, strict=True):
        values = np.frombuffer(content, f"u{width}")
        is_sparse = n <= _MAX_SPARSE_SHARE * len(values)
        split = 4 * n if is_sparse else 0
        if n:
            size = split + width * (n if is_sparse else len(values))
            payload: bytes = _codec().decompress(_read(file, first_byte, num_bytes), size, asbytes=True)
            folded = _join_bytes(payload[split:], width)
            positions = np.cumsum(_join_bytes(payload[:split], 4), dtype=np.int64) - 1 if is_sparse else slice(None)
            values[positions] += (folded >> 1) ^ -(folded & 1)
    return bytes(content)


def _split_bytes(values: NDArray[Any]) -> bytes:
    """Return the lowest byte of all values, then the next one of all. Bytes of one kind compress better together."""
    parts = np.empty((values.itemsize, len(values)), np.uint8)
    for i, part in enumerate(parts):
        np.right_shift(values, 8 * i, out=part, casting="unsafe")  # ten times as fast as copying every second or fourth byte
    return parts.tobytes()


def _join_bytes(data: bytes, width: int) -> NDArray[Any]:
    """Invert `_split_bytes`."""
    *lower, values = (part.astype(f"u{width}") for part in np.frombuffer(data, np.uint8).reshape(width, -1))
    for part in reversed(lower):
        values = (values << 8) | part
    return values


def _read(file: BinaryIO, start: int, num_bytes: int) -> bytes:
    """Read without moving the file's position, because several threads read it."""
    data = os.pread(file.fileno(), num_bytes, start)
    if len(data) != num_bytes:
        raise WeightsError(f"{file.name} ends before byte {start + num_bytes}: it is shorter than recorded")
    return data


@cache
def _codec() -> Any:
    return import_module("pyarrow").Codec("zstd", compression_level=1)  # imported here: only runs with weights.delta need it
