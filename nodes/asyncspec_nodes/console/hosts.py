"""Names and addresses of hosts, as users write them."""

from __future__ import annotations

import ipaddress


def is_host(host: str) -> bool:
    """True for what may be a host's name or its address, whether there is one or not."""
    try:
        host.encode("idna")  # as whoever connects will do
    except UnicodeError:
        return False
    return bool(host.strip()) and "/" not in host


def is_loopback(host: str) -> bool:
    """True for an address that no other machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
