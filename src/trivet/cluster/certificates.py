"""Makes the certificates with which the Ray processes of one job prove themselves to each other (TLS in both directions).

The job has an authority of its own. Its key lies in the private directory of the job; the key of a node never leaves the node.
"""

from dataclasses import dataclass
from pathlib import Path

import trustme

from trivet.storage.durable import write_atomically


@dataclass(frozen=True, slots=True)
class Identity:
    """The files of a certificate and of its key."""

    certificate: Path
    key: Path


def authority_in(directory: Path) -> Identity:
    """Return the files of an authority in `directory`."""
    return Identity(directory / "ca.crt", directory / "ca.key")


def make_authority(directory: Path) -> Identity:
    """Make an authority whose files are in `directory`. Only the owner may read its key."""
    authority = trustme.CA()
    return _write(authority_in(directory), authority.cert_pem, authority.private_key_pem)


def certify(authority: Identity, directory: Path, *, addresses: list[str]) -> Identity:
    """Make a certificate for a node that has these addresses; its files are in `directory`.

    Args:
        addresses: IP addresses, without names: Ray's processes know each other by addresses.
    """
    issuer = trustme.CA.from_pem(authority.certificate.read_bytes(), authority.key.read_bytes())
    node = issuer.issue_cert(*addresses)
    return _write(Identity(directory / "node.crt", directory / "node.key"), node.cert_chain_pems[0], node.private_key_pem)


def _write(files: Identity, certificate: trustme.Blob, key: trustme.Blob) -> Identity:
    write_atomically(files.key, key.bytes(), is_private=True)
    write_atomically(files.certificate, certificate.bytes())
    return files
