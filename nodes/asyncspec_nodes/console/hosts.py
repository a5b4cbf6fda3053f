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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
