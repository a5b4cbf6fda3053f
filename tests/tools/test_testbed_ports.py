"""Ports of beds and tests."""

from __future__ import annotations

import socket
from pathlib import Path

from tools.testbed.ports import free_ports


def test_they_differ_and_no_outgoing_connection_can_take_one() -> None:
    ports = free_ports(200)
    assert len(set(ports)) == 200
    socket.create_server(("127.0.0.1", ports[0])).close()
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if file.exists():
        assert max(ports) < int(file.read_text().split()[0])
