"""An authority, and one certificate that it signs, for all processes of a run."""

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)
_VALID = 3650 * _DAY  # longer than any run: the files end with it


def make_certificates(server_name: str) -> tuple[bytes, bytes, bytes]:
    """Returns the authority's certificate, that of the processes and its key, as PEM.

    Args:
        server_name: The name of every server and client in the certificate.
    """
    authority_key = ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    authority = _named("a run of Treadle")
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    root = (
        _unsigned(authority, authority, authority_key, authority=True)
        .add_extension(identifier, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    of_authority = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    leaf = (
        _unsigned(authority, _named(server_name), key, authority=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name)]), critical=False)
        .add_extension(of_authority, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return root.public_bytes(pem), leaf.public_bytes(pem), private


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _unsigned(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, authority: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - _DAY,  # the clocks of nodes differ
        not_valid_after=now + _VALID,
    )
    basic = x509.BasicConstraints(ca=authority, path_length=0 if authority else None)
    return builder.add_extension(basic, critical=True).add_extension(usage, critical=True)
