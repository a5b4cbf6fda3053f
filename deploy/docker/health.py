"""The container's health check: ``/health`` where the ASYNCSPEC_HTTP... variables say that the node
serves HTTP. The certificate is not checked: it names the service, not this container."""

from __future__ import annotations

import http.client
import os
import ssl
import sys

EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def healthy() -> bool:
    said = os.environ.get("ASYNCSPEC_HTTP_HOST") or "127.0.0.1"
    host, port = EVERY.get(said, said), int(os.environ["ASYNCSPEC_HTTP"])
    if os.environ.get("ASYNCSPEC_TLS_CERTIFICATE"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        asked = http.client.HTTPSConnection(host, port, timeout=5, context=context)
    else:
        asked = http.client.HTTPConnection(host, port, timeout=5)
    try:
        asked.request("GET", "/health")
        return asked.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


sys.exit(not healthy())
