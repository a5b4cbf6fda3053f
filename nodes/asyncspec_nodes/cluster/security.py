"""Mutual TLS 1.3 with the cluster's own authority.

A certificate says what its holder may be in the cluster, not a host name: nodes move between
addresses. Its roles are URIs among its subject's alternative names: ``urn:asyncspec:node:RANK``,
``node`` (any rank), ``stage`` (any but a draft node's), ``client``, ``operator``. One without is
refused. Both sides refuse certificates of other authorities, and those that ``crl`` names.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncspec.actor.link import Certificate
from asyncspec.actor.mesh import PLAIN, Security
from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.config import SecurityTable
from asyncspec_protocol.ids import is_draft
from asyncspec_protocol.links import Facts

if TYPE_CHECKING:  # it is loaded where there are keys
    from cryptography import x509

URN = "urn:asyncspec:"
NODE, STAGE, CLIENT, OPERATOR = "node", "stage", "client", "operator"


NO_ROLE = "names no role: make a new one (make-keys.sh DIRECTORY NAME=ROLE)"
"""What is said of certificates such as earlier versions made."""

OTHER_AUTHORITY = "its certificate is of no authority that ca names now"
"""What is said of certificates that an authority has issued which is trusted no more."""


def roles_of(certificate: Certificate) -> frozenset[str]:
    """The roles that a certificate names."""
    names = certificate.get("subjectAltName", ())
    return frozenset(
        value.removeprefix(URN) for kind, value in names if kind == "URI" and value.startswith(URN)
    )


def role_problem(roles: frozenset[str], peer: Facts) -> str:
    """Why a certificate with these roles does not fit its holder; empty where it does."""
    if not roles:
        return f"its certificate {NO_ROLE}"
    if peer.role == "client":
        asks = roles & {CLIENT, OPERATOR, NODE} or any(map(_is_node, roles))
        return "" if asks else f"its certificate is for {_named(roles)}, not for a client"
    fits = {NODE, f"{NODE}:{peer.rank}"} | (set() if is_draft(peer.rank) else {STAGE})
    return "" if roles & fits else f"its certificate is for {_named(roles)}, not rank {peer.rank}"


def _is_node(role: str) -> bool:
    return role.startswith(f"{NODE}:")


def _named(roles: frozenset[str]) -> str:
    return ", ".join(sorted(roles))


class Keys(Security):
    """Of a cluster with keys. ``reload`` reads all files again: connections that are made from
    then on use them."""

    def __init__(self, table: SecurityTable) -> None:
        """Raises ``UserError``."""
        self._table = table
        self._contexts = _context(ssl.PROTOCOL_TLS_SERVER), _context(ssl.PROTOCOL_TLS_CLIENT)
        self.server, self.client = self._contexts
        self._authorities: tuple[x509.Certificate, ...] = ()
        self._revoked: frozenset[int] = frozenset()
        self._read_at: tuple[int, ...] = ()
        self.reload()

    def reload(self) -> None:
        """Raises ``UserError``, and then changes nothing."""
        read_at, authorities = self._modified(), _authorities(self._table)
        revoked = _revoked(self._table, authorities)
        # What fits together here fits into the contexts in use, too: those would keep half of it.
        _load(_context(ssl.PROTOCOL_TLS_CLIENT), self._table)
        for context in self._contexts:
            _load(context, self._table)
        self._authorities, self._revoked, self._read_at = authorities, revoked, read_at

    def changed(self) -> bool:
        """Whether a file is another one than was read."""
        try:
            return self._modified() != self._read_at
        except UserError:
            return False  # it is being replaced

    def problem(self, certificate: Certificate | None, peer: Facts) -> str:
        if certificate is None:
            return "it shows no certificate"
        # TLS accepts every authority that the contexts have ever loaded.
        if not any(_issued(certificate["der"], one) for one in self._authorities):
            return OTHER_AUTHORITY
        if int(certificate.get("serialNumber", "0"), 16) in self._revoked:
            return "its certificate is revoked"
        return role_problem(roles_of(certificate), peer)

    def operator(self, certificate: Certificate | None) -> bool:
        return certificate is not None and OPERATOR in roles_of(certificate)

    def _modified(self) -> tuple[int, ...]:
        """Of every file, in ns. Raises ``UserError``."""
        times = []
        for name in self._table.__struct_fields__:
            path = Path(getattr(self._table, name))
            if not getattr(self._table, name):
                continue
            try:
                times.append(path.stat().st_mtime_ns)
            except OSError:
                raise UserError(f"[security] {name}: there is no file {path}") from None
        return tuple(times)


def contexts(table: SecurityTable | None) -> Security:
    """For listening and dialling; plain TCP where there is no table. Raises ``UserError``."""
    return PLAIN if table is None else Keys(table)


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load(context: ssl.SSLContext, table: SecurityTable) -> None:
    try:
        context.load_cert_chain(table.certificate, table.key)
        context.load_verify_locations(table.ca)
    except (ssl.SSLError, OSError) as error:
        why = getattr(error, "reason", None) or error
        raise UserError(f"[security] certificate, key and ca do not fit together: {why}") from None


def _authorities(table: SecurityTable) -> tuple[x509.Certificate, ...]:
    """All that ``ca`` names. Raises ``UserError``."""
    from cryptography import x509

    try:
        return tuple(x509.load_pem_x509_certificates(Path(table.ca).read_bytes()))
    except (ValueError, OSError) as error:
        raise UserError(f"[security] ca: {table.ca} has no certificate: {error}") from None


def _issued(certificate: bytes, authority: x509.Certificate) -> bool:
    """Whether an authority itself has signed a certificate, DER."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        x509.load_der_x509_certificate(certificate).verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _revoked(table: SecurityTable, authorities: Sequence[x509.Certificate]) -> frozenset[int]:
    """Serial numbers in the revocation list. Raises ``UserError``."""
    if not table.crl:
        return frozenset()
    from cryptography import x509

    try:
        found = x509.load_pem_x509_crl(Path(table.crl).read_bytes())
        keys = [one.public_key() for one in authorities]
        valid = any(found.is_signature_valid(key) for key in keys)  # type: ignore[arg-type]
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"[security] crl: {table.crl} is no revocation list: {error}") from None
    if not valid:
        raise UserError(f"[security] crl: {table.crl} is not signed by the authority in ca")
    return frozenset(one.serial_number for one in found)
