"""Addresses of peers while the cluster file changes, and where a node listens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.file import load, parse
from asyncspec_nodes.node.renewal import PeerAddresses
from asyncspec_protocol.ids import Rank

CLUSTER = """
[target]
path = "toy:"
[[node]]
rank = 0
host = "127.0.0.1"
port = 7700
[[node]]
rank = 1
host = "127.0.0.1"
port = 7701
"""
ONE = Rank(1)


def write(file: Path, text: str, at: int) -> None:
    """With a time of its own, however coarse the clock of the file system is."""
    file.write_text(text)
    os.utime(file, ns=(at, at))


def test_a_node_may_move_while_others_run(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    write(file, CLUSTER, 10**9)
    peers = PeerAddresses(load(file), file)
    assert peers[ONE] == ("127.0.0.1", 7701)
    write(file, CLUSTER.replace("7701", "7799"), 2 * 10**9)
    assert peers[ONE] == ("127.0.0.1", 7799)
    # Half written, wrong or gone: what was known counts.
    write(file, CLUSTER[:-10], 3 * 10**9)
    assert peers[ONE] == ("127.0.0.1", 7799)
    file.unlink()
    assert peers[ONE] == ("127.0.0.1", 7799)
    assert sorted(peers) == [0, 1]
    assert PeerAddresses(parse(CLUSTER), None)[ONE] == ("127.0.0.1", 7701)


def test_a_node_that_moves_while_others_load_is_found(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    write(file, CLUSTER, 10**9)
    config = load(file)
    write(file, CLUSTER.replace("7701", "7799"), 2 * 10**9)
    assert PeerAddresses(config, file)[ONE] == ("127.0.0.1", 7799)


def test_listening_elsewhere_than_others_dial() -> None:
    behind_nat = CLUSTER.replace("port = 7701", 'port = 7701\nlisten = "{}"')
    assert parse(behind_nat.format("127.0.0.1:9000")).at(1).listen == "127.0.0.1:9000"
    for wrong, says in (
        ("9000", "listen of rank 1: 9000 is not HOST:PORT"),
        ("0.0.0.0:9000", r"0.0.0.0 \(listen of rank 1\) is not a loopback address"),
    ):
        with pytest.raises(UserError, match=says):
            parse(behind_nat.format(wrong))
