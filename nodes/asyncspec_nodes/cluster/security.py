"""Mutual TLS 1.3 with the cluster's own authority.

A certificate says what its holder may be in the cluster, not a host name: nodes move between
addresses. Its roles are URIs among its subject's alternative names: ``urn:asyncspec:node:RANK``,
``node`` (any rank), ``stage`` (any but a draft node's), ``client``, ``operator``. One without is
refused. Both sides refuse certificates of other authorities, and those that ``crl`` names.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from asyncspec.actor.link import Certificate
from asyncspec.actor.mesh import PLAIN, Security
from asyncspec.core.errors import UserError, reading
from asyncspec_nodes.cluster.config import SecurityTable
from asyncspec_protocol.ids import is_draft
from asyncspec_protocol.links import Facts

if TYPE_CHECKING:  # it is loaded where there are keys
    from cryptography import x509

URN = "urn:asyncspec:"
NODE, STAGE, CLIENT, OPERATOR = "node", "stage", "client", "operator"


NO_ROLE = "names no role: make a new one (asyncspec keys DIRECTORY NAME=ROLE)"
"""What is said of certificates such as earlier versions made."""

CHECK_SECONDS = 5.0
"""Between looks at the files."""

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
    """Security by keys. ``reload`` reads all files again: connections that are made from then on
    use them."""

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
        for problem in file_problems(self._table):
            raise UserError(problem)
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
        return self.trust_problem(certificate) or role_problem(roles_of(certificate), peer)

    def trust_problem(self, certificate: Certificate) -> str:
        """Why a certificate counts for nothing, whatever its roles; empty where it counts."""
        # TLS accepts every authority that the contexts have ever loaded.
        if not any(_issued(certificate["der"], one) for one in self._authorities):
            return OTHER_AUTHORITY
        if int(certificate.get("serialNumber", "0"), 16) in self._revoked:
            return "its certificate is revoked"
        return ""

    def operator(self, certificate: Certificate | None) -> bool:
        return certificate is not None and OPERATOR in roles_of(certificate)

    def _modified(self) -> tuple[int, ...]:
        """When every file was changed, in ns. Raises ``UserError``."""
        with reading("the files of [security]"):
            return tuple(path.stat().st_mtime_ns for path in _files(self._table).values())


def contexts(table: SecurityTable | None) -> Security:
    """For listening and dialling; plain TCP where there is no table. Raises ``UserError``."""
    return PLAIN if table is None else Keys(table)


async def renewals(security: Security, every: float = CHECK_SECONDS) -> AsyncGenerator[str, None]:
    """Read the files again when they have changed, looked at ``every`` so many seconds: yields ""
    for each time, or once why they do not fit together, as while one of them is being replaced,
    which changes nothing. Ends at once without keys."""
    refused = ""
    while isinstance(security, Keys):
        await asyncio.sleep(every)
        if not security.changed():
            continue
        try:
            security.reload()
        except UserError as error:
            if str(error) != refused:
                refused = str(error)
                yield refused
        else:
            refused = ""
            yield refused


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _files(table: SecurityTable) -> dict[str, Path]:
    """By their keys in the table."""
    named = {name: getattr(table, name) for name in table.__struct_fields__}
    return {f"[security] {name}": Path(file) for name, file in named.items() if file}


def file_problems(table: SecurityTable) -> Iterator[str]:
    """A line for each file that is missing, or that this process may not read."""
    return filter(None, (file_problem(*one) for one in _files(table).items()))


def file_problem(name: str, path: Path) -> str:
    """Why this process cannot read a file; empty where it can. ``name``: what names it."""
    try:
        with path.open("rb"):
            return ""
    except FileNotFoundError:
        return f"{name}: there is no file {path}"
    except OSError as error:
        return f"{name}: {path} cannot be read: {error.strerror}"


def load_chain(context: ssl.SSLContext, certificate: Path, key: Path, name: str) -> None:
    """Load a certificate chain and its private key, PEM. ``name``: what names the key. Raises
    ``UserError`` for an encrypted one, for which OpenSSL would ask the terminal; ``SSLError``."""

    def ask() -> NoReturn:
        raise UserError(
            f"{name}: {key} is encrypted; give it without a password (openssl pkey -in FILE -out "
            "NEW), readable by the node's user alone"
        )

    context.load_cert_chain(certificate, key, password=ask)


def _load(context: ssl.SSLContext, table: SecurityTable) -> None:
    try:
        load_chain(context, Path(table.certificate), Path(table.key), "[security] key")
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
        revoked = x509.load_pem_x509_crl(Path(table.crl).read_bytes())
        keys = [one.public_key() for one in authorities]
        valid = any(revoked.is_signature_valid(key) for key in keys)  # type: ignore[arg-type]
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"[security] crl: {table.crl} is no revocation list: {error}") from None
    if not valid:
        raise UserError(f"[security] crl: {table.crl} is not signed by the authority in ca")
    return frozenset(one.serial_number for one in revoked)
