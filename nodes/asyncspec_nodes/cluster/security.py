"""Mutual TLS 1.3 with the cluster's own authority, by the standard library alone.

A certificate proves membership in the cluster, not a host name: nodes move between addresses. Both
sides refuse certificates of other authorities. The authority signs nothing else.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from asyncspec.actor.mesh import Security
from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.config import SecurityTable


def contexts(table: SecurityTable | None) -> Security:
    """TLS contexts for listening and dialling; plain TCP where there is no table."""
    if table is None:
        return Security()
    for name in table.__struct_fields__:
        path = Path(getattr(table, name))
        if not path.is_file():
            raise UserError(f"[security] {name}: there is no file {path}")
    return Security(
        server=_context(ssl.PROTOCOL_TLS_SERVER, table),
        client=_context(ssl.PROTOCOL_TLS_CLIENT, table),
    )


def _context(protocol: int, table: SecurityTable) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(table.certificate, table.key)
        context.load_verify_locations(table.ca)
    except (ssl.SSLError, OSError) as error:
        why = getattr(error, "reason", None) or error
        raise UserError(f"[security] certificate, key and ca do not fit together: {why}") from None
    return context
