"""Describes, reads and fingerprints the tensors of a published policy. The trainer and the workers of servers call it."""

import hashlib
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from trivet.wire.transfers import TensorInfo

_CPU_CHUNK, _GPU_CHUNK = 1 << 15, 1 << 24
"""Words that are mixed at a time. 256 KiB stay in a core's cache: 1.3 GB/s; 8 MiB do not: 0.6 GB/s. A GPU is faster with more."""
_BY_POSITION, _BY_VALUE = -0x61C8864680B583EB, -0x40A7B892E31B1A47
"""Odd constants of splitmix64: multiplication by them loses no bit. Source: Steele et al., OOPSLA 2014."""


def describe(name: str, tensor: torch.Tensor) -> TensorInfo:
    """Return the description of `tensor`."""
    return TensorInfo(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


def map_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the published policy in `directory`, in the order of their names, without reading them.

    They are views of the files, which the trainer has just written, so their pages are still in main memory. The files are sent,
    and not the copies from which they were written, because writing renames and regroups tensors: servers know the files' names.
    """
    tensors = {name: each for file in sorted(directory.glob("*.safetensors")) for name, each in load_file(file).items()}
    return dict(sorted(tensors.items()))


class Fingerprint:
    """Computes a fingerprint of tensors on their device. One changed word always changes it; other changes escape once in 2^64."""

    def __init__(self) -> None:
        self._infos: list[TensorInfo] = []
        self._sums: list[torch.Tensor] = []
        """A sum for each tensor, on its device: it is read at the end, so that no tensor is waited for."""

    def add(self, info: TensorInfo, tensor: torch.Tensor) -> None:
        """Add a tensor. Each word of 8 bytes adds to its sum a value that depends on word and position; sums wrap around."""
        data = tensor.reshape(-1).view(torch.uint8)
        if rest := -len(data) % 8:
            data = torch.cat([data, data.new_zeros(rest)])
        words = data.clone().view(torch.int64) if data.data_ptr() % 8 else data.view(torch.int64)
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        size = _CPU_CHUNK if tensor.device.type == "cpu" else _GPU_CHUNK
        for start in range(0, len(words), size):
            chunk = words[start : start + size]
            places = torch.arange(start, start + len(chunk), device=tensor.device)
            mixed = places.mul_(_BY_POSITION).add_(chunk).mul_(_BY_VALUE)
            total += mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF)).sum()
        self._infos.append(info)
        self._sums.append(total)

    def digest(self) -> str:
        """Return SHA-256 over name, dtype, shape and sum of every tensor, in the order of names."""
        sums = torch.stack(self._sums).tolist() if self._sums else []
        lines = sorted((info.name, info.dtype, info.shape, each) for info, each in zip(self._infos, sums, strict=True))
        return hashlib.sha256(msgspec.json.encode(lines)).hexdigest()


def fingerprint_files(directory: Path) -> str:
    """Return the fingerprint of the published policy in `directory`."""
    fingerprint = Fingerprint()
    for name, tensor in map_tensors(directory).items():
        fingerprint.add(describe(name, tensor), tensor)
    return fingerprint.digest()
