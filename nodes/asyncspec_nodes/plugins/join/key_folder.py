"""A folder with a cluster's authority and with the certificates and keys that it has issued, for
clusters whose machines do not join by a token."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from asyncspec.core.errors import UserError, first_line, reading, writing
from asyncspec_nodes.cluster.security import CLIENT, NODE, OPERATOR
from asyncspec_nodes.plugins.join.authority import (
    CA,
    Authority,
    make_key,
    make_request,
    write_private,
)

CA_KEY, LIST, REVOKED = "ca.key", "crl.pem", "revoked.txt"

ROLES = f"{NODE}, {NODE}:RANK, {CLIENT}, {OPERATOR}"
"""The roles that a holder may have, for people."""

MAX_NAME = 64
"""Bytes of a certificate's common name."""

_ROLE = re.compile(rf"{NODE}(:(0|[1-9][0-9]*))?|{CLIENT}|{OPERATOR}")
_RESERVED = {Path(name).stem for name in (CA, LIST)}
# As ``openssl ca`` writes and reads its database: "R", the end, the revocation, the serial number.
_TIME = "%y%m%d%H%M%SZ"


class Holder(NamedTuple):
    """Whom a certificate is for."""

    name: str
    roles: tuple[str, ...] = (NODE,)

    @classmethod
    def read(cls, text: str) -> Holder:
        """Parse ``NAME[=ROLE[,ROLE]]``. Raises ``UserError``."""
        name, stated, roles = text.partition("=")
        if problem := _name_problem(name):
            raise UserError(f"{text}: {problem}")
        holder = cls(name, tuple(roles.split(","))) if stated else cls(name)
        for role in holder.roles:
            if not _ROLE.fullmatch(role):
                raise UserError(f"{text}: the role {role or repr(role)} is none of {ROLES}")
        return holder


def issue(folder: Path, holders: Sequence[Holder]) -> None:
    """Write ``NAME.pem`` and ``NAME.key`` of each, in place of those that are there. ``folder`` is
    made, readable by its owner alone, and its authority, where there are none; not the folders
    above it, one of which may be misspelt. Raises ``UserError``."""
    with writing(f"the keys in {folder}"):
        authority = _authority(folder)
        for name, roles in holders:
            key = make_key()
            certificate = authority.issue(make_request(key, name), *roles)
            write_private(folder / f"{name}.key", key)
            write_private(folder / f"{name}.pem", certificate)


def revoke(folder: Path, names: Iterable[str]) -> int:
    """Write ``crl.pem`` with the certificates of these names beside those that it had: how many
    there are then. Raises ``UserError``."""
    certificates = [_certificate(folder, name) for name in names]
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    with writing(f"the keys in {folder}"):
        authority = _authority(folder)
        lines = _lines(folder / REVOKED)
        revoked = dict(_revocations(folder / REVOKED, lines))
        for certificate in certificates:
            if certificate.serial_number not in revoked:
                revoked[certificate.serial_number] = now
                lines.append(_line(certificate, now))
        write_private(folder / REVOKED, "".join(f"{line}\n" for line in lines))
        write_private(folder / LIST, authority.revoke(revoked))
    return len(revoked)


def _name_problem(name: str) -> str:
    """Why a holder cannot have this name, which names its files; empty where it can."""
    if name in _RESERVED:
        return f"{name}.pem is the {'authority' if f'{name}.pem' == CA else 'revocation list'}'s"
    if not name.isprintable() or not name or name[0] in ".-" or {*name} & {*"/\\"}:
        return "the name must be one of a file, and begin neither with . nor with -"
    size = len(name.encode(errors="replace"))
    return f"the name has {size} bytes; at most {MAX_NAME}" if size > MAX_NAME else ""


def _authority(folder: Path) -> Authority:
    """The folder's; a new one where it has none. Raises ``UserError``, ``OSError``."""
    key, certificate = folder / CA_KEY, folder / CA
    if not key.exists() and not certificate.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        authority = Authority.new()
        write_private(key, authority.key)
        write_private(certificate, authority.pem)
        return authority
    for file in (key, certificate):
        if not file.exists():
            raise UserError(
                f"{folder} has the half of an authority: there is no {file.name}; put it there, or "
                "take another folder"
            )
    with reading(f"{key} and {certificate.name}"):
        texts = key.read_text("utf-8"), certificate.read_text("utf-8")
    try:
        return Authority(*texts)
    except (ValueError, TypeError) as error:
        why = first_line(error)
        raise UserError(f"{key} and {certificate.name} are no authority: {why}") from None


def _certificate(folder: Path, name: str) -> x509.Certificate:
    """The one that was issued to a name last. Raises ``UserError``."""
    file = folder / f"{name}.pem"
    if not file.exists():
        raise UserError(f"{name}: there is no certificate {file}")
    with reading(str(file)):
        data = file.read_bytes()
    try:
        return x509.load_pem_x509_certificate(data)
    except ValueError as error:
        raise UserError(f"{name}: {file} is no certificate: {first_line(error)}") from None


def _lines(file: Path) -> list[str]:
    """The lines of a file that may be missing. Raises ``UserError``."""
    with reading(str(file)):
        return file.read_text("utf-8").splitlines() if file.exists() else []


def _revocations(file: Path, lines: Iterable[str]) -> Iterator[tuple[int, datetime.datetime]]:
    """Serial numbers with the time, UTC. Raises ``UserError``."""
    for number, line in enumerate(lines, start=1):
        fields = line.split("\t")
        if fields[0] != "R":
            continue
        try:
            at = datetime.datetime.strptime(fields[2].partition(",")[0], _TIME)
            yield int(fields[3], 16), at.replace(tzinfo=datetime.UTC)
        except (ValueError, IndexError):
            raise UserError(f"{file}: line {number} is no revocation") from None


def _line(certificate: x509.Certificate, at: datetime.datetime) -> str:
    ends, serial = certificate.not_valid_after_utc, certificate.serial_number
    subject = certificate.subject.rfc4514_string()
    digits = f"{serial:X}"
    digits = digits.zfill(len(digits) + len(digits) % 2)
    return "\t".join(
        ("R", ends.strftime(_TIME), at.strftime(_TIME), digits, "unknown", f"/{subject}")
    )
