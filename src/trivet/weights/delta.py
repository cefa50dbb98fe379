"""Writes and applies deltas: files that hold what changed from one published policy, the base, to the next.

A delta is the exclusive or of the bytes of both, compressed by chunks. An optimizer step moves most values by few units in the last
place, so many of these bytes are zero, even where all values changed. On another base they give other bytes. So a delta is applied
to a copy, and the result compared with the digests of the published files. `weights.publish` writes deltas, and `weights.fetch`
applies them. Both know the files that a delta covers, and their order, from the policy's manifest.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from trivet.errors import WeightsError
from trivet.storage.durable import FileRecord
from trivet.weights.manifest import Manifest

MAX_DELTA_SHARE = 0.6
"""Share of a policy's bytes above which deltas are given up: with more, the time saved is little, and a CPU's is spent."""
_CHUNK_BYTES = 2 << 20
"""Bytes of a chunk, part of the format. The arrays of a chunk then fit the processor's cache."""
_NUM_THREADS = min(4, os.cpu_count() or 1)
"""Enough for 1 GB of weights in a second. More would take the processor from training."""

ItemT = TypeVar("ItemT")


def write_delta(base: Path, directory: Path, path: Path, *, old: Manifest, new: Manifest) -> None:
    """Write to `path` the delta from policy `old` in `base` to policy `new` in `directory`, in memory that does not grow with them.

    Raises OSError or WeightsError if a file cannot be read or written, if files have other names or sizes, or if the delta would be
    too large. Part of it is left in `path`.
    """
    old_sizes, new_sizes = ({n: r.num_bytes for n, r in manifest.files.items()} for manifest in (old, new))
    if old_sizes != new_sizes:
        raise WeightsError(f"{directory} has other files than {base}, or files of other sizes")
    with path.open("wb") as out:
        for name, record in new.files.items():
            for frame in _map_in_order(partial(_encode, base / name, directory / name), _divide(record.num_bytes)):
                out.write(len(frame).to_bytes(4, "little") + frame)
                if out.tell() > MAX_DELTA_SHARE * new.num_bytes:
                    raise WeightsError(f"it would have more than {MAX_DELTA_SHARE:.0%} of the policy's bytes")


def apply_deltas(paths: Sequence[Path], base: Path, directory: Path, *, manifest: Manifest, suffix: str = "") -> None:
    """Make the files of policy `manifest` in `directory` from the policy in `base`, and compare their digests.

    Args:
        paths: deltas, each of which applies to the result of the one before it.
        suffix: appended to the name of a file until its digest is known to be right.

    Raises:
        WeightsError: the deltas do not lead from that base to that policy, or a file was altered. Part of the policy is left.
    """
    try:
        with ExitStack() as stack:
            deltas = [stack.enter_context(path.open("rb")) for path in paths]
            for name, record in manifest.files.items():
                made, digest = directory / f"{name}{suffix}", xxhash.xxh3_128()
                places = ((place, [_read_frame(delta) for delta in deltas]) for place in _divide(record.num_bytes))
                with made.open("wb") as out:
                    for content in _map_in_order(partial(_decode, base / name), places):
                        out.write(content)
                        digest.update(content)
                if FileRecord(made.stat().st_size, digest.hexdigest()) != record:
                    raise WeightsError(f"{base / name} or {paths[-1]} was altered: they do not give the published file")
                made.rename(directory / name)
    except (OSError, ValueError) as exc:  # altered bytes are not zstd
        raise WeightsError(f"{paths[-1]} cannot be applied to {base}: {exc}") from exc


def _map_in_order(function: Callable[[ItemT], bytes], items: Iterable[ItemT]) -> Iterator[bytes]:
    """Yield the results for `items`, in order, from threads that are a few items ahead."""
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="delta") as executor:
        pending: deque[Future[bytes]] = deque()
        for item in items:
            pending.append(executor.submit(function, item))
            if len(pending) > 2 * _NUM_THREADS:
                yield pending.popleft().result()
        yield from (future.result() for future in pending)


def _divide(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and size of each chunk of a file."""
    return ((start, min(_CHUNK_BYTES, num_bytes - start)) for start in range(0, num_bytes, _CHUNK_BYTES))


def _encode(base: Path, path: Path, place: tuple[int, int]) -> bytes:
    """Return the frame of a chunk: its compressed differences, or nothing if there are none."""
    differences = _read(base, place) ^ _read(path, place)
    if not differences.any():
        return b""
    in_order = np.empty(differences.shape, np.uint8)
    in_order[:] = differences  # five times as fast as differences.tobytes()
    return _codec().compress(in_order, asbytes=True)


def _decode(base: Path, item: tuple[tuple[int, int], list[bytes]]) -> bytes:
    """Return the bytes of a chunk after all deltas, given its place in the base and its frame in each delta."""
    place, frames = item
    content = _read(base, place)
    for frame in filter(None, frames):
        content ^= np.frombuffer(_codec().decompress(frame, content.size, asbytes=True), np.uint8).reshape(4, -1)
    return content.T.tobytes()[: place[1]]


def _read(path: Path, place: tuple[int, int]) -> NDArray[np.uint8]:
    """Return a chunk, filled up with zeros, as four rows: the first byte of every four bytes, the second one, and so on.

    Bytes of one row compress better together, for values of two bytes too.
    """
    start, num_bytes = place
    with path.open("rb") as file:
        file.seek(start)
        content = bytearray(file.read(num_bytes))
    if len(content) != num_bytes:
        raise WeightsError(f"{path} ends before byte {start + num_bytes}: it is shorter than recorded")
    content += bytes(-num_bytes % 4)
    return np.frombuffer(content, np.uint8).reshape(-1, 4).T


def _read_frame(delta: BinaryIO) -> bytes:
    """Return the next frame of a delta."""
    num_bytes = int.from_bytes(delta.read(4), "little")
    frame = delta.read(num_bytes)
    if len(frame) != num_bytes:
        raise WeightsError(f"{delta.name} is shorter than a delta of this policy")
    return frame


@cache
def _codec() -> Any:
    return import_module("pyarrow").Codec("zstd", compression_level=1)  # imported here: only runs with weights.delta need it
