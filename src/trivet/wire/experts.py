"""Defines how the experts that a server chose travel with the tokens: through buffer, records and checkpoints to the trainer.

The choice of each token and layer is a set, so it is kept sorted, as the first expert and the distances between neighbours, one
byte each for up to 256 experts. Distances compress to within about a seventh of what a uniform choice needs: for 8 of 128 experts
to 72% of a byte each.

Legend: T tokens, L layers of the model (dense ones included), K experts of a token.
"""

import base64
import binascii
import io
import zlib
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np

from trivet.errors import MessageRefused

UNKNOWN = -1
"""Stands for an expert in the rows of tokens whose choice is not known. The trainer's own router chooses there."""
_MAX_EXPERTS = 2**15
"""Experts have smaller numbers than this, which int16 holds."""
_LEVEL = 1
"""Level of zlib. Level 6 takes twice the time and saves three bytes of a hundred."""


class RoutedExperts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The experts of a sample's first tokens, compressed. The last token of a completion is never computed, so it has none."""

    shape: tuple[int, int, int]
    """T, L, K. T may be less than the tokens of the sample."""
    item_bytes: int
    """Bytes of a number before compression: 1, or 2 for more than 256 experts."""
    data: bytes

    @classmethod
    def compress(cls, experts_TLK: np.ndarray) -> "RoutedExperts":
        """Compress experts, integers from 0, whose order within a token and layer does not count."""
        assert experts_TLK.ndim == 3
        assert experts_TLK.min(initial=0) >= 0
        assert experts_TLK.max(initial=0) < _MAX_EXPERTS
        dtype = np.dtype("u1" if experts_TLK.max(initial=0) < 256 else "<u2")
        distances_TLK = np.diff(np.sort(experts_TLK.astype(np.int32), axis=-1), axis=-1, prepend=0).astype(dtype)
        num_tokens, num_layers, num_chosen = experts_TLK.shape
        data = zlib.compress(distances_TLK.tobytes(), _LEVEL)
        return cls(shape=(num_tokens, num_layers, num_chosen), item_bytes=dtype.itemsize, data=data)

    def decompress(self, num_tokens: int) -> np.ndarray:
        """Return int16 [num_tokens, L, K]: experts in ascending order, cut, or filled up with `UNKNOWN`.

        Raises:
            MessageRefused: the data is damaged.
        """
        num_bytes = self.item_bytes * int(np.prod(self.shape, dtype=np.int64))
        try:
            content = zlib.decompressobj().decompress(self.data, num_bytes + 1)  # a few bytes can ask for memory without end
        except zlib.error as exc:
            raise MessageRefused(f"routed experts are damaged: {exc}") from exc
        if self.item_bytes not in (1, 2) or len(content) != num_bytes:
            raise MessageRefused(f"routed experts of shape {self.shape} have {len(content)} bytes")
        distances_TLK = np.frombuffer(content, dtype=f"<u{self.item_bytes}").reshape(self.shape)
        known_TLK = np.cumsum(distances_TLK, axis=-1, dtype=np.int16)[:num_tokens]
        filled_TLK = np.full((num_tokens, *self.shape[1:]), UNKNOWN, dtype=np.int16)
        filled_TLK[: len(known_TLK)] = known_TLK
        return filled_TLK


def read_experts(text: str) -> np.ndarray:
    """Return the array in vLLM's field `routed_experts`, integers [T, L, K]: base64 of a file in numpy's format.

    Raises:
        MessageRefused: the text is no such array.
    """
    try:
        experts_TLK: object = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, binascii.Error) as exc:
        raise MessageRefused(f"routed_experts of an answer cannot be read: {exc}") from exc
    array = cast("np.ndarray[Any, np.dtype[Any]]", experts_TLK)
    if not isinstance(experts_TLK, np.ndarray) or array.ndim != 3 or array.dtype.kind not in "ui":
        raise MessageRefused("routed_experts of an answer are not integers for each token, layer and choice")
    return array


def join_experts(turns: Sequence[RoutedExperts]) -> RoutedExperts:
    """Join the experts of a conversation's turns, each from the first token on.

    A token keeps the experts of the first turn that computed it: with these the next token was sampled. The last token of a turn is
    computed by the next turn.
    """
    if len(turns) == 1:
        return turns[0]
    parts: list[np.ndarray] = []
    num_known = 0
    for turn in turns:
        parts.append(turn.decompress(turn.shape[0])[num_known:])
        num_known = max(num_known, turn.shape[0])
    return RoutedExperts.compress(np.concatenate(parts))
