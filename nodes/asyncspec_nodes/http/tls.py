"""TLS for the HTTP service, by the standard library alone; the cluster's own links have theirs."""

from __future__ import annotations

import ssl
from pathlib import Path

from asyncspec.errors import UserError


def server_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """A context for a certificate chain and its private key (PEM); None where neither is given.
    Raises ``UserError``."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UserError("--tls-certificate and --tls-key belong together; give both")
    for name, path in (("--tls-certificate", certificate), ("--tls-key", key)):
        if not path.is_file():
            raise UserError(f"{name}: there is no file {path}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        why = getattr(error, "reason", None) or error
        raise UserError(f"--tls-certificate and --tls-key do not fit together: {why}") from None
    return context
