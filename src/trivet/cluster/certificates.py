"""Makes the certificates with which the Ray processes of one job prove themselves to each other (TLS in both directions).

The job has an authority of its own. Its key lies in the private directory of the job; the key of a node never leaves the node.
"""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from trivet.storage.durable import write_atomically

_VALID = timedelta(days=400)
"""Longer than any job runs. The authority goes with its job."""
_CLOCK_ERROR = timedelta(days=1)
"""A node whose clock is slow refuses a certificate that begins later."""


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
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("trivet job")
    builder = _builder(name, issuer=name, key=key).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _write(authority_in(directory), builder.sign(key, hashes.SHA256()), key)


def certify(authority: Identity, directory: Path, *, addresses: list[str]) -> Identity:
    """Make a certificate for a node that has these addresses; its files are in `directory`.

    Args:
        addresses: IP addresses, without names: Ray's processes know each other by addresses.
    """
    issuer = x509.load_pem_x509_certificate(authority.certificate.read_bytes())
    issuer_key = serialization.load_pem_private_key(authority.key.read_bytes(), password=None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address)) for address in addresses])
    builder = _builder(_name(addresses[0]), issuer=issuer.subject, key=key).add_extension(names, critical=False)
    files = Identity(directory / "node.crt", directory / "node.key")
    return _write(files, builder.sign(issuer_key, hashes.SHA256()), key)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(name: x509.Name, *, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - _CLOCK_ERROR,
        not_valid_after=now + _VALID,
    )


def _write(files: Identity, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Identity:
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_atomically(files.key, text, is_private=True)
    write_atomically(files.certificate, certificate.public_bytes(serialization.Encoding.PEM))
    return files
