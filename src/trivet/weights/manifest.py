"""Makes, reads and verifies the manifest of a policy: the names, sizes and digests of its files, and one digest over all of them.

That digest identifies a policy. The trainer writes it, a server reports it after loading, and both must be equal.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trivet.algorithms.probe import Probe
from trivet.config.layout import DELTA, MANIFEST, NOT_OF_POLICY, STABLE, parse_step
from trivet.errors import WeightsError
from trivet.storage.durable import DECODE_ERRORS, FileRecord, digest_of, explain_difference, format_json, hash_files
from trivet.wire.versions import START_VERSION, FetchablePolicy, PolicyVersion


class DeltaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A published delta. Its file lies in the directory of each policy whose manifest has this record."""

    base_version: PolicyVersion
    """The policy that it applies to."""
    base_digest: str
    file: FileRecord

    @property
    def name(self) -> str:
        """Name of the file."""
        return DELTA.format(self.base_version)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of manifest.json."""

    version: PolicyVersion
    files: dict[str, FileRecord]
    digest: str
    """SHA-256 over the sorted names, sizes and digests of the files."""
    run_id: str = ""
    """Id of the run that published the policy."""
    probe: Probe | None = None
    """The log-probabilities that a server must reproduce after loading the policy; None: nothing is compared."""
    deltas: tuple[DeltaRecord, ...] = ()
    """The newest deltas that lead to this policy. The last one makes it, and each other one makes the base of the next."""

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(record.num_bytes for record in self.files.values())

    @property
    def weight_files(self) -> dict[str, FileRecord]:
        """The files that have tensors, in the order of their names."""
        return {name: record for name, record in sorted(self.files.items()) if name.endswith(".safetensors")}

    @property
    def sha256(self) -> str:
        """SHA-256 of manifest.json as it is published."""
        return hashlib.sha256(format_json(self)).hexdigest()


MAX_MANIFEST_BYTES = 64 << 20
"""A larger file is refused unread: a manifest of a thousand files has less than a MiB."""


def make_manifest(directory: Path, *, version: PolicyVersion, run_id: str = "", probe: Probe | None = None) -> Manifest:
    """Hash every file of `directory`, except manifest and marker, and make their manifest."""
    names = [path.name for path in directory.iterdir() if path.is_file() and not any(map(path.match, NOT_OF_POLICY))]
    files = hash_files(directory, names)
    return Manifest(version=version, files=files, digest=digest_of(files), run_id=run_id, probe=probe)


def make_start_manifest(directory: Path) -> Manifest:
    """Make the manifest of version 0 from the weight files of the start model, whose directory has no manifest."""
    files = hash_files(directory, [path.name for path in directory.glob("*.safetensors")])
    return Manifest(version=START_VERSION, files=files, digest=digest_of(files))


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a published policy, without reading the files that it lists."""
    if not (directory / STABLE).exists():
        raise WeightsError(f"{directory} has no {STABLE}: it was not published completely")
    return read_manifest_file(directory / MANIFEST)


def read_manifest_file(path: Path) -> Manifest:
    """Return the manifest in the file `path`. Every name in it is the name of a file without a path."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_MANIFEST_BYTES:
            raise WeightsError(f"{path} cannot be read: it is missing, or no file of at most {MAX_MANIFEST_BYTES >> 20} MiB")
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, *DECODE_ERRORS) as exc:
        raise WeightsError(f"{path} cannot be read: {exc}") from exc
    for name in manifest.files:
        if name in ("", ".", "..") or not {"/", "\\", "\0"}.isdisjoint(name):
            raise WeightsError(f"{path} names {name[:100]!r}, which is no file of its directory: the manifest was altered")
    return manifest


def offer_policy(directory: Path, *, sources: Sequence[str]) -> FetchablePolicy:
    """Return what a server needs to fetch the policy published in `directory` from `sources`."""
    manifest, sha256 = read_manifest(directory), hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()
    return FetchablePolicy(version=manifest.version, digest=manifest.digest, manifest_sha256=sha256, sources=tuple(sources))


def verify_manifest(directory: Path, *, max_bytes: int | None = None) -> Manifest:
    """Check the manifest of a published policy as `verify` does, without its files. Return the manifest."""
    manifest = read_manifest(directory)
    version = parse_step(directory.name)
    if version not in (None, manifest.version):
        raise WeightsError(f"{directory / MANIFEST} is of version {manifest.version}: it was copied from another directory")
    if manifest.digest != digest_of(manifest.files):
        raise WeightsError(f"{directory / MANIFEST} does not match its own digest: the manifest was altered")
    if max_bytes is not None and manifest.num_bytes > max_bytes:
        raise WeightsError(f"{directory} has {manifest.num_bytes} bytes, where at most {max_bytes} are loaded")
    return manifest


def verify(directory: Path) -> Manifest:
    """Compare every file of a published policy with its manifest, which is returned. Raises WeightsError if they differ."""
    manifest = verify_manifest(directory)
    verify_files(directory, manifest)
    return manifest


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Check the files of a policy as `verify` does. `manifest` is that of `verify_manifest`."""
    for name in manifest.files:
        if (directory / name).is_symlink():
            raise WeightsError(f"{directory / name} is a link: a weights directory holds its own files")
    if difference := explain_difference(directory, manifest.files):
        raise WeightsError(f"{directory} is not what was published as version {manifest.version}: {difference}")
    # A server loads every *.safetensors it finds, listed or not.
    unlisted = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in manifest.files)
    if unlisted:
        raise WeightsError(f"{directory / unlisted[0]} is not in {MANIFEST}: it was added after publication; remove it")
