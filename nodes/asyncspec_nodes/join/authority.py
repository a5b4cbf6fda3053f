"""The cluster's own authority, and certificates that it issues. Private keys stay where they are
made: a member sends a signing request."""

from __future__ import annotations

import datetime
import hashlib
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.security import URN

DAYS = 3650
CA, CERTIFICATE, KEY = "ca.pem", "node.pem", "node.key"
"""Names in a member's folder, as in ``[security]``."""


class Authority:
    """Signs members' certificates; its key is in this process alone."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        name = _name("asyncspec cluster")
        builder = _builder(name, name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        builder = builder.add_extension(_usage(signs=True), True)
        self._certificate = builder.sign(self._key, None)

    @property
    def pem(self) -> str:
        """Its certificate."""
        return _pem(self._certificate)

    def issue(self, request: str, *roles: str) -> str:
        """A member's certificate for ``roles`` (``cluster.security``), PEM. Raises ``UserError``
        for a request that is none."""
        try:
            found = x509.load_pem_x509_csr(request.encode())
            if not found.is_signature_valid:
                raise ValueError
        except ValueError:
            raise UserError("the signing request is none; upgrade the older side") from None
        builder = _builder(found.subject, self._certificate.subject, found.public_key())
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
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        descriptor = os.open(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(private)
        builder = x509.CertificateSigningRequestBuilder().subject_name(_name(name))
        # The signing request, PEM.
        self.request = builder.sign(key, None).public_bytes(serialization.Encoding.PEM).decode()

    def receive(self, authority: str, certificate: str) -> None:
        """Keep the issued certificate beside the key."""
        (self._folder / CA).write_text(authority)
        (self._folder / CERTIFICATE).write_text(certificate)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the certificate."""
        pem = (self._folder / CERTIFICATE).read_bytes()
        certificate = x509.load_pem_x509_certificate(pem)
        return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64] or "node")])


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
