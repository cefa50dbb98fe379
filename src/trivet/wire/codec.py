"""Structs to bytes and back. Arrays travel as dtype, shape and raw little-endian bytes, and are read without a copy."""

from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from trivet.errors import MessageRefused

StructT = TypeVar("StructT", bound=msgspec.Struct)

SCHEMA_VERSION = 1
"""Raised whenever a struct in `wire` changes in a way that an older reader would misread."""

_ALLOWED_DTYPES = frozenset({"|b1", "|u1", "<i4", "<i8", "<f4", "<f8"})


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, np.dtype[Any]]", value)
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        return (little.dtype.str, little.shape, little.data.cast("B") if little.size else b"")
    raise TypeError(f"{type(value).__name__} has no wire form")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"{kind.__name__} has no wire form")
    dtype, shape, data = value
    if dtype not in _ALLOWED_DTYPES:
        raise ValueError(f"array of dtype {dtype!r}; allowed: {sorted(_ALLOWED_DTYPES)}")
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview, kind: type[StructT]) -> StructT:
    """Decode `data` as `kind`; arrays in the result are read-only views of `data`.

    Raises:
        MessageRefused: the bytes are not a `kind` of this schema.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, TypeError) as exc:
        raise MessageRefused(f"{len(data)} bytes are not a {kind.__name__} of schema {SCHEMA_VERSION}: {exc}") from exc
