"""The manifest of a weights directory: which files belong to it, their sizes and digests, and one digest over all.

The digest is the identity of a policy: the trainer writes it, the server reports it after loading, and both must be equal.
"""

from pathlib import Path

import msgspec

from trivet.config.layout import MANIFEST, STABLE, parse_step
from trivet.durable import DECODE_ERRORS, FileRecord, digest_of, explain_difference, hash_files
from trivet.errors import WeightsError
from trivet.wire.versions import START_VERSION, PolicyVersion


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    version: PolicyVersion
    files: dict[str, FileRecord]
    digest: str
    """SHA-256 over the sorted names, sizes and digests of the files."""
    run_id: str = ""


def describe(directory: Path, *, version: PolicyVersion, run_id: str = "") -> Manifest:
    """Hash every file of `directory` (manifest and marker aside) into a manifest."""
    names = [path.name for path in directory.iterdir() if path.is_file() and path.name not in (MANIFEST, STABLE)]
    files = hash_files(directory, names)
    return Manifest(version=version, files=files, digest=digest_of(files), run_id=run_id)


def describe_start_model(directory: Path) -> Manifest:
    """Version 0: the start model's weight files, which carry no manifest of ours."""
    files = hash_files(directory, [path.name for path in directory.glob("*.safetensors")])
    return Manifest(version=START_VERSION, files=files, digest=digest_of(files))


def read_manifest(directory: Path) -> Manifest:
    """
    Raises:
        WeightsError: the directory has no marker or no readable manifest.
    """
    if not (directory / STABLE).exists():
        raise WeightsError(f"{directory} has no {STABLE}: it was not published completely")
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, *DECODE_ERRORS) as exc:
        raise WeightsError(f"{directory / MANIFEST} cannot be read: {exc}") from exc


def verify(directory: Path) -> Manifest:
    """Read every file and compare it with the manifest.

    Raises:
        WeightsError: a file is missing, truncated, altered or, for weight files, not listed; or the manifest is that of another
            version than the directory's name says; names it.
    """
    manifest = read_manifest(directory)
    version = parse_step(directory.name)
    if version not in (None, manifest.version):
        raise WeightsError(f"{directory / MANIFEST} is of version {manifest.version}: it was copied from another directory")
    if manifest.digest != digest_of(manifest.files):
        raise WeightsError(f"{directory / MANIFEST} does not match its own digest: the manifest was altered")
    if difference := explain_difference(directory, manifest.files):
        raise WeightsError(f"{directory} is not what was published as version {manifest.version}: {difference}")
    # A server loads every *.safetensors it finds, listed or not.
    unlisted = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in manifest.files)
    if unlisted:
        raise WeightsError(f"{directory / unlisted[0]} is not in {MANIFEST}: it was added after publication; remove it")
    return manifest
