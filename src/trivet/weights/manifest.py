"""The manifest of a weights directory: which files belong to it, their sizes and digests, and one digest over all.

The digest is the identity of a policy: the trainer writes it, the server reports it after loading, and both must be equal.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from trivet.config.layout import MANIFEST, STABLE
from trivet.errors import WeightsError
from trivet.wire.versions import START_VERSION, PolicyVersion

_CHUNK_BYTES = 8 << 20


class FileRecord(msgspec.Struct, frozen=True):
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    version: PolicyVersion
    files: dict[str, FileRecord]
    digest: str
    """SHA-256 over the sorted names, sizes and digests of the files."""
    run_id: str = ""


def hash_file(path: Path) -> FileRecord:
    digest = hashlib.sha256()
    num_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return FileRecord(num_bytes, digest.hexdigest())


def describe(directory: Path, *, version: PolicyVersion, run_id: str = "") -> Manifest:
    """Hash every file of `directory` (manifest and marker aside) into a manifest."""
    names = sorted(path.name for path in directory.iterdir() if path.is_file() and path.name not in (MANIFEST, STABLE))
    with ThreadPoolExecutor() as pool:
        files = dict(zip(names, pool.map(lambda name: hash_file(directory / name), names), strict=True))
    return Manifest(version=version, files=files, digest=_digest(files), run_id=run_id)


def describe_start_model(directory: Path) -> Manifest:
    """Version 0: the start model's weight files, which carry no manifest of ours."""
    files = {path.name: hash_file(path) for path in sorted(directory.glob("*.safetensors"))}
    return Manifest(version=START_VERSION, files=files, digest=_digest(files))


def read_manifest(directory: Path) -> Manifest:
    """
    Raises:
        WeightsError: the directory has no marker or no readable manifest.
    """
    if not (directory / STABLE).exists():
        raise WeightsError(f"{directory} has no {STABLE}: it was not published completely")
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as exc:
        raise WeightsError(f"{directory / MANIFEST} cannot be read: {exc}") from exc


def verify(directory: Path) -> Manifest:
    """Read every file and compare it with the manifest.

    Raises:
        WeightsError: a file is missing, truncated or altered; names it.
    """
    manifest = read_manifest(directory)
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise WeightsError(f"{path} is missing; the manifest lists {expected.num_bytes} bytes")
        found = path.stat().st_size
        if found != expected.num_bytes:
            raise WeightsError(f"{path} has {found} bytes; the manifest lists {expected.num_bytes}")
        if hash_file(path).sha256 != expected.sha256:
            raise WeightsError(f"{path} does not match its digest in the manifest: the file was altered")
    if manifest.digest != _digest(manifest.files):
        raise WeightsError(f"{directory / MANIFEST} does not match its own digest: the manifest was altered")
    return manifest


def _digest(files: Mapping[str, FileRecord]) -> str:
    lines = [f"{name} {record.num_bytes} {record.sha256}" for name, record in sorted(files.items())]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()
