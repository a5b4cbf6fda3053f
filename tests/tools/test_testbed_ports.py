"""Ports of beds and tests."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tools.testbed.ports import free_ports


def test_they_differ_and_no_outgoing_connection_can_take_one() -> None:
    ports = free_ports(200)
    assert len(set(ports)) == 200
    socket.create_server(("127.0.0.1", ports[0])).close()
    assert not set(ports) & set(free_ports(200))
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if file.exists():
        assert max(ports) < int(file.read_text().split()[0])


def test_processes_beside_each_other_are_given_different_ones() -> None:
    code = "from tools.testbed.ports import free_ports; print(*free_ports(50))"
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)
    ]
    said = [child.communicate()[0].split() for child in children]
    assert len({port for ports in said for port in ports}) == 200
