"""The cluster's own authority, and certificates that it issues. Private keys stay where they are
made: a member sends a signing request."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.security import URN

DAYS = 3650
CA, CERTIFICATE, KEY = "ca.pem", "node.pem", "node.key"
"""Names in a member's folder, as in ``[security]``."""


class Authority:
    """Signs members' certificates. ``key`` and ``pem``: its own key and certificate, PEM."""

    def __init__(self, key: str, pem: str) -> None:
        self.key = key
        self.pem = pem
        self._key = _load(key)
        self._subject = x509.load_pem_x509_certificate(pem.encode()).subject

    @classmethod
    def new(cls) -> Authority:
        """One that has signed nothing."""
        key = make_key()
        private = _load(key)
        name = _name("asyncspec cluster")
        builder = _builder(name, name, private.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        builder = builder.add_extension(_usage(signs=True), True)
        return cls(key, _pem(builder.sign(private, None)))

    def issue(self, request: str, *roles: str) -> str:
        """A member's certificate for ``roles`` (``cluster.security``), PEM. Raises ``UserError``
        for a request that is none."""
        try:
            found = x509.load_pem_x509_csr(request.encode())
            if not found.is_signature_valid:
                raise ValueError
        except ValueError:
            raise UserError("the signing request is none; upgrade the older side") from None
        builder = _builder(found.subject, self._subject, found.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), False)
        names = [x509.UniformResourceIdentifier(f"{URN}{role}") for role in roles]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        return _pem(builder.sign(self._key, None))


class Identity:
    """A member's private key, in a folder that only its user can read."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        key = make_key()
        write_key(folder, key)
        # The signing request, PEM.
        self.request = make_request(key, name)

    def receive(self, authority: str, certificate: str) -> None:
        """Keep the issued certificate beside the key."""
        (self._folder / CA).write_text(authority)
        self.renew(certificate)

    def renew(self, certificate: str) -> None:
        """Keep another certificate, which nodes that run read within seconds."""
        written = self._folder / f"{CERTIFICATE}.new"
        written.write_text(certificate)
        written.replace(self._folder / CERTIFICATE)


def make_key() -> str:
    """A new private key, PEM."""
    private = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private.decode()


def make_request(key: str, name: str) -> str:
    """A signing request for a key, PEM."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name(name))
    return builder.sign(_load(key), None).public_bytes(serialization.Encoding.PEM).decode()


def write_key(folder: Path, key: str) -> None:
    """A file that only its user can read."""
    descriptor = os.open(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(key)


def digest(certificate: str) -> bytes:
    """SHA-256 of a certificate, PEM."""
    return x509.load_pem_x509_certificate(certificate.encode()).fingerprint(hashes.SHA256())


def _load(key: str) -> Ed25519PrivateKey:
    private = serialization.load_pem_private_key(key.encode(), None)
    assert isinstance(private, Ed25519PrivateKey)
    return private


def _name(text: str) -> x509.Name:
    # 64 bytes at most, and no part of a character.
    cut = text.encode(errors="ignore")[:64].decode(errors="ignore")
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, cut or "node")])


def _builder(subject: x509.Name, issuer: x509.Name, public: object) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)  # type: ignore[arg-type]
        .serial_number(x509.random_serial_number())
        # Clocks differ.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
