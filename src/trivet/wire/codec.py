"""Encodes structs as bytes and decodes them. Arrays travel as dtype, shape and raw little-endian bytes; decoding copies none."""

import math
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from trivet.errors import MessageRefused

StructT = TypeVar("StructT", bound=msgspec.Struct)

SCHEMA_VERSION = 1
"""Increase it when a struct in `wire` changes so that an older reader would misread it. Readers refuse another number."""

_ALLOWED_DTYPES = frozenset({"|b1", "|u1", "<i4", "<i8", "<f4", "<f8"})
_RAW = 1
"""MessagePack extension type of an array's bytes: unlike a plain byte string it is handed over as a view."""


def _encode_array(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} cannot be encoded")
    array = cast("np.ndarray[Any, np.dtype[Any]]", value)
    little_endian = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    if little_endian.dtype.str not in _ALLOWED_DTYPES:
        raise TypeError(f"array of dtype {little_endian.dtype.str!r} cannot be encoded; allowed: {sorted(_ALLOWED_DTYPES)}")
    content = little_endian.data.cast("B") if little_endian.size else b""
    return (little_endian.dtype.str, array.shape, msgspec.msgpack.Ext(_RAW, content))


def _decode_raw(code: int, data: memoryview) -> memoryview:
    if code != _RAW:
        raise ValueError(f"extension type {code} is unknown")
    return data


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"{kind.__name__} cannot be decoded")
    name, shape, data = value
    if name not in _ALLOWED_DTYPES:
        raise ValueError(f"array of dtype {name!r}; allowed: {sorted(_ALLOWED_DTYPES)}")
    dtype = np.dtype(name)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"an array of shape {shape} and dtype {name!r} does not have {len(data)} bytes")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: msgspec.Struct) -> bytes:
    """Encode `message` as MessagePack; raises TypeError for an array whose dtype is not allowed."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview, kind: type[StructT]) -> StructT:
    """Decode `data` as `kind`; arrays in the result are read-only views of `data`.

    Raises:
        MessageRefused: the bytes are not a `kind` of this schema.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_array, ext_hook=_decode_raw)
    try:
        return decoder.decode(data)
    # A few bytes can ask for nesting without end; the interpreter stops it with RecursionError.
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as exc:
        raise MessageRefused(f"{len(data)} bytes are not a {kind.__name__} of schema {SCHEMA_VERSION}: {exc}") from exc
