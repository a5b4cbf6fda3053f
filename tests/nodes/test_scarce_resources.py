"""Nodes whose disk is full and whose files are few."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from actor.local_cluster import LocalCluster, hello
from asyncspec_nodes.cluster.config import (
    ClusterTable,
    Config,
    DraftTable,
    NodeTable,
    TargetTable,
)
from asyncspec_nodes.cluster.file import to_toml
from asyncspec_nodes.node import inspector as inspector_module
from asyncspec_nodes.node.inspector import MEMORY_SECONDS, Inspector
from cluster import ask
from nodes.background import files_left
from tools.testbed.ports import free_ports

FILES = 256
"""A node's limit, the least it runs with."""

FLOOD = 2 * FILES
READY_SECONDS = 240.0


def few_files() -> None:
    """In a child, before it is the node."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[list[int]]:
    """Of a draft node, of its HTTP, and of a stage; their logs go to a full disk."""
    draft, web, stage = found = free_ports(3)
    config = Config(
        TargetTable("toy:"),
        (NodeTable(0, "127.0.0.1", draft), NodeTable(1, "127.0.0.1", stage)),
        cluster=ClusterTable(name="scarce", stages=1),
        draft=DraftTable("ngram"),
    )
    file = tmp_path / "cluster.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    command = (sys.executable, "-P", "-m", "asyncspec_nodes.node.cli", "--config", str(file))
    roles = [("draft", "0", "--http", str(web)), ("verify", "1")]
    with open("/dev/full", "w") as full:
        nodes = [
            subprocess.Popen(
                [*command, "--role", role, "--rank", *rest], stderr=full, preexec_fn=few_files
            )
            for role, *rest in roles
        ]
    try:
        yield found
        assert [node.poll() for node in nodes] == [None, None]
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(240)


def asked(connection: http.client.HTTPConnection) -> str:
    body = {"model": "toy:", "prompt": "Once", "max_tokens": 8, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    text: str = json.loads(answer.read())["choices"][0]["text"]
    return text


def ready(port: int) -> http.client.HTTPConnection:
    """A connection to a service that is ready."""
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
        with contextlib.suppress(OSError):
            connection.request("GET", "/ready")
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                return connection
        connection.close()
        time.sleep(0.1)
    raise AssertionError("it is not ready")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_floods_of_connections_and_a_full_disk_stop_no_answer(ports: list[int]) -> None:
    """Of those beyond the limit of open files each is closed; who was there before goes on."""
    with contextlib.closing(ready(ports[1])) as kept:
        first = asked(kept)
        for port in ports:
            flood(port, kept, first)
            with contextlib.closing(ready(ports[1])) as new:
                assert asked(new) == first


def flood(port: int, kept: http.client.HTTPConnection, expected: str) -> None:
    """More connections than a node may have, and an answer meanwhile."""
    with contextlib.ExitStack() as stack:
        for _ in range(FLOOD):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(240)
            sock.connect(("127.0.0.1", port))
        assert asked(kept) == expected


def test_a_node_without_a_file_says_how_it_is() -> None:
    """With the memory that it had last; its links go on."""

    async def main() -> None:
        async with LocalCluster(1) as cluster:
            await cluster.ask(ask(max_new_tokens=3))
            now = 5.0
            inspector = Inspector(cluster.nodes[1], hello(1, 1), clock=lambda: now)
            before = inspector.status(0)
            assert before.memory_bytes
            assert before.free_bytes
            now += MEMORY_SECONDS
            with files_left(0):
                scarce = inspector.status(1)
            kept = (scarce.memory_bytes, scarce.free_bytes)
            assert kept == (before.memory_bytes, before.free_bytes)
            assert scarce.peers

    asyncio.run(main())


def test_questions_in_a_row_are_answered_with_one_look_at_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads several of the kernel's files, and clients may ask as fast as they can."""
    sizes = count(1)
    monkeypatch.setattr(inspector_module, "resident_bytes", lambda: next(sizes))

    async def main() -> list[int]:
        async with LocalCluster(1) as cluster:
            now = 5.0
            inspector = Inspector(cluster.nodes[1], hello(1, 1), clock=lambda: now)
            first = [inspector.status(number).memory_bytes for number in range(3)]
            now += MEMORY_SECONDS
            return [*first, inspector.status(3).memory_bytes]

    assert asyncio.run(main()) == [1, 1, 1, 2]
