"""Host names and addresses."""

from __future__ import annotations

import ipaddress


def is_host(host: str) -> bool:
    """Whether ``host`` is a well-formed host name or address."""
    try:
        host.encode("idna")  # as connecting does
    except UnicodeError:
        return False
    return bool(host.strip()) and "/" not in host


def address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that ``host`` is; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    parsed = address(host)
    return host == "localhost" if parsed is None else parsed.is_loopback
