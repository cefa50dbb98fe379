"""Sends messages between a pool and a worker over a socket. A message is its length in eight bytes, then an encoded struct.

The socket is one of a pair: it has no name that another process could find, and each side notices at once when the other ends.
"""

import asyncio
import socket
import struct

import msgspec

from trivet.errors import MessageRefused
from trivet.wire.codec import StructT, decode, encode

MAX_MESSAGE_BYTES = 256 * 2**20
"""Both sides refuse a longer message, so that a wrong length cannot make the receiver fill its memory."""
_LENGTH = struct.Struct("<Q")
_BUFFER_BYTES = 2**20


class Channel:
    """One side of the connection between a pool and a worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> "Channel":
        """Take over `sock`."""
        return cls(*await asyncio.open_connection(sock=sock, limit=_BUFFER_BYTES))

    def post(self, message: msgspec.Struct) -> None:
        """Send a message without waiting. If the other side has ended, drop the message; `receive` then reports the end.

        Raises:
            MessageRefused: the message is too large.
        """
        if not self._writer.is_closing():
            self._writer.write(pack_message(message))

    async def receive(self, message_type: type[StructT]) -> StructT | None:
        """Return the next message; None when the other side has ended. Arrays in it are views of the received bytes.

        Raises:
            MessageRefused: the bytes are not a `message_type`, or are more than a message may have.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            _require_fits(length)
            data = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return None
        return decode(data, message_type)

    async def aclose(self) -> None:
        """Close this side; the other side sees the end. May be called again."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return


def pack_message(message: msgspec.Struct) -> bytes:
    """Return the bytes of `message` with its length before them.

    Raises:
        MessageRefused: it is too large, or holds what cannot be encoded: half of a character, an integer beyond 64 bits, too deep
            a nesting, or an object.
    """
    try:
        data = encode(message)
    except (ValueError, OverflowError, RecursionError, TypeError) as exc:
        raise MessageRefused(f"a message cannot be encoded ({type(exc).__name__}: {exc})") from exc
    _require_fits(len(data))
    return _LENGTH.pack(len(data)) + data


def _require_fits(num_bytes: int) -> None:
    if num_bytes > MAX_MESSAGE_BYTES:
        raise MessageRefused(
            f"a message of {num_bytes / 2**20:.0f} MiB is larger than what fits between a worker and its pool "
            f"({MAX_MESSAGE_BYTES // 2**20} MiB)"
        )
