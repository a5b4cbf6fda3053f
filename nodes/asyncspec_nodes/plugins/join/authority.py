"""The cluster's own authority, and certificates that it issues. Private keys of machines that join
stay where they are made: a member sends a signing request."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import (
    CertificateIssuerPrivateKeyTypes,
    CertificatePublicKeyTypes,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.security import URN

DAYS = 3650
CLOCKS_DIFFER = datetime.timedelta(days=1)
"""Certificates are valid from so long before they are made."""

CA, CERTIFICATE, KEY = "ca.pem", "node.pem", "node.key"
"""Names in a member's folder, as in ``[security]``."""


class Authority:
    """Signs members' certificates. ``key`` and ``pem``: its own key and certificate, PEM."""

    def __init__(self, key: str, pem: str) -> None:
        """Raises ``ValueError``, and ``TypeError`` for an encrypted key."""
        self.key = key
        self.pem = pem
        self._key = _load(key)
        certificate = x509.load_pem_x509_certificate(pem.encode())
        if certificate.public_key() != self._key.public_key():
            raise ValueError("they do not belong together")
        self._subject = certificate.subject
        self._identifier = _identifier(certificate)

    @classmethod
    def new(cls) -> Authority:
        """One that has signed nothing."""
        key = make_key()
        private = _load(key)
        name = _name("asyncspec cluster")
        builder = _builder(name, name, private.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        builder = builder.add_extension(_usage(signs=True), True)
        return cls(key, _pem(builder.sign(private, _hash(private))))

    def issue(self, request: str, *roles: str) -> str:
        """A member's certificate for ``roles`` (``cluster.security``), PEM. Raises ``UserError``
        for a request that is none."""
        try:
            signing_request = x509.load_pem_x509_csr(request.encode())
            if not signing_request.is_signature_valid:
                raise ValueError
        except ValueError:
            raise UserError("the signing request is none; upgrade the older side") from None
        builder = _builder(signing_request.subject, self._subject, signing_request.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), False)
        names = [x509.UniformResourceIdentifier(f"{URN}{role}") for role in roles]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        builder = builder.add_extension(self._identifier, False)
        return _pem(builder.sign(self._key, _hash(self._key)))

    def revoke(self, serials: Mapping[int, datetime.datetime]) -> str:
        """A revocation list, PEM, of the certificates with these serial numbers; the values are the
        times of their revocation, UTC."""
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateRevocationListBuilder(
            self._subject, now - CLOCKS_DIFFER, now + datetime.timedelta(days=DAYS)
        )
        for serial, at in serials.items():
            revoked = x509.RevokedCertificateBuilder(serial, at).build()
            builder = builder.add_revoked_certificate(revoked)
        builder = builder.add_extension(self._identifier, False)
        signed = builder.sign(self._key, _hash(self._key))
        return signed.public_bytes(serialization.Encoding.PEM).decode()


class Identity:
    """A member's private key, in a folder that only its user can read."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        key = make_key()
        write_private(folder / KEY, key)
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


def write_private(file: Path, text: str) -> None:
    """Make or replace a file, as a whole, that only its user can read. Raises ``OSError``."""
    written = file.with_name(f"{file.name}.new")
    written.unlink(missing_ok=True)
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
    written.replace(file)


def digest(certificate: str) -> bytes:
    """SHA-256 of a certificate, PEM."""
    return x509.load_pem_x509_certificate(certificate.encode()).fingerprint(hashes.SHA256())


def _load(key: str) -> CertificateIssuerPrivateKeyTypes:
    return serialization.load_pem_private_key(key.encode(), None)  # type: ignore[return-value]


def _hash(key: CertificateIssuerPrivateKeyTypes) -> hashes.SHA256 | None:
    """What a key signs with: Edwards curves have their own."""
    return None if isinstance(key, (Ed25519PrivateKey, Ed448PrivateKey)) else hashes.SHA256()


def _identifier(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """The key of an authority, as the certificates that it has issued name it."""
    try:
        stated = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        stated = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(stated)


def _name(text: str) -> x509.Name:
    # 64 bytes at most, and no part of a character.
    cut = text.encode(errors="ignore")[:64].decode(errors="ignore")
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, cut or "node")])


def _builder(
    subject: x509.Name, issuer: x509.Name, public: CertificatePublicKeyTypes
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
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
