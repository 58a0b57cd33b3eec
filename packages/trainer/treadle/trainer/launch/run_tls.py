"""The certificates of a run on several hosts.

The driver makes an authority for each attempt of a run, and with it one certificate for all of its
processes, as servers and as clients. A process that has the key belongs to the run, on any host:
the certificate names `SERVER_NAME` instead of hosts, which are not known before Ray has placed a
process.

Invariants: the authority's key is never written, so nothing else can be certified. The other files
can be read by the present user only, on each node, and are gone when the run ends; nothing trusts
them afterwards.
"""

import datetime
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from treadle.agent_loop.run_certificate import CERTIFICATE, KEY, ROOTS, SERVER_NAME

__all__ = ["RunTls", "run_tls", "write_private"]

_DAY = datetime.timedelta(days=1)
_VALID = 3650 * _DAY  # longer than any run: the files end with it


@dataclass(frozen=True, slots=True)
class RunTls:
    """The files of a run's certificates; picklable.

    Attributes:
        directory: Absolute; the same path on every node.
    """

    directory: Path

    @property
    def certificate(self) -> Path:
        """PEM file of the certificate of every process."""
        return self.directory / CERTIFICATE

    @property
    def key(self) -> Path:
        """PEM file of its private key."""
        return self.directory / KEY

    @property
    def roots(self) -> Path:
        """PEM file of the authority's certificate."""
        return self.directory / ROOTS

    def read(self) -> Mapping[Path, bytes]:
        """Returns the content of each file of the directory, by its path."""
        return {path: path.read_bytes() for path in sorted(self.directory.glob("[!.]*"))}


@contextmanager
def run_tls(directory: Path) -> Iterator[RunTls]:
    """Makes the certificates of a run; afterwards the directory is gone.

    Args:
        directory: Where the files go. What a killed run left there is replaced.
    """
    made = RunTls(directory.absolute())
    _remove(made.directory)
    try:
        for path, content in zip((made.roots, made.certificate, made.key), _make(), strict=True):
            write_private(path, content)
        yield made
    finally:
        _remove(made.directory)


def write_private(path: Path, content: bytes) -> None:
    """Writes a file that only the present user can read, unless it holds the content already.

    It appears complete. Its directory is made, likewise private, if it is missing.
    """
    with suppress(FileNotFoundError):
        if path.read_bytes() == content:
            return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The directory may be one for all nodes.
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    partial.replace(path)


def _remove(directory: Path) -> None:
    if directory.is_dir():
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


def _make() -> tuple[bytes, bytes, bytes]:
    """Returns the authority's certificate, that of the processes and its key, as PEM."""
    # Its library belongs to the extra `ray`: runs on one machine do without.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    authority_key = ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    authority = named("a run of Treadle")

    def unsigned(subject: x509.Name, of: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return x509.CertificateBuilder(
            issuer_name=authority,
            subject_name=subject,
            public_key=of.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - _DAY,  # the clocks of nodes differ
            not_valid_after=now + _VALID,
        )

    def usage(*, signs_certificates: bool) -> x509.KeyUsage:
        return x509.KeyUsage(
            digital_signature=not signs_certificates,
            key_cert_sign=signs_certificates,
            crl_sign=signs_certificates,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )

    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    root = (
        unsigned(authority, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    leaf = (
        unsigned(named(SERVER_NAME), key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            ),
            critical=False,
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return root.public_bytes(pem), leaf.public_bytes(pem), private
