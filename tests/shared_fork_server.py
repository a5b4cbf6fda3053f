"""One fork server for all local clusters of a test process, and ``--check`` without a process:
importing torch and transformers takes seconds of processor time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec
import psutil
from msgspec.structs import replace

from asyncspec.backend import registry
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import Config, DraftTable, TargetTable
from asyncspec_nodes.cluster.file import load, to_toml
from asyncspec_nodes.local import fork_server
from asyncspec_nodes.local.children import FORKS, ForkedProcess, ForkServerClient
from asyncspec_nodes.local.cluster import FILE, local_config
from asyncspec_nodes.local.fork_server import INTEGER
from asyncspec_nodes.node import cli
from asyncspec_nodes.node.cli import huge_page_environment
from asyncspec_nodes.reference.check import CheckRequest, Comparison, Task, compare_all
from asyncspec_nodes.roles.stage_probe import StageStates

STOP_SECONDS = 120.0
"""More than the server needs to import what nodes need, and to end its nodes."""


class ForkedNode:
    """A node forked from the shared server, with what tests use of ``subprocess.Popen``."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes], status: IO[bytes]) -> None:
        self.stdout = stdout
        self._stdin = stdin
        self._status = status
        (self.pid,) = INTEGER.unpack(status.read(INTEGER.size))

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """The exit code, once. Raises ``TimeoutError``."""
        if not select.select([self._status], [], [], timeout)[0]:
            raise TimeoutError(f"process {self.pid} has not ended within {timeout} s")
        (code,) = INTEGER.unpack(self._status.read(INTEGER.size))
        return int(code)

    def communicate(self, timeout: float) -> None:
        """Close its stdin and wait for its end."""
        with self._stdin, self.stdout, self._status:
            self._stdin.close()
            self.stdout.read()
            self.wait(timeout)


class SharedForkServer(ForkServerClient):
    """A server that outlives the clusters whose nodes it forks. Forks of this process have it
    too."""

    def __init__(self, path: str) -> None:
        """``path``: of a target of the backend to import."""
        folder = Path(tempfile.mkdtemp(prefix="asyncspec-test-"))  # removed by the server
        target, draft = TargetTable(path=path), DraftTable(source="none")
        config = local_config(target, draft, 1, 1)
        # Ports that nobody opens, but that differ: of a file with mistakes no model is imported.
        nodes = (replace(node, port=port) for port, node in enumerate(config.node, 1))
        file = folder / FILE
        file.write_text(to_toml(replace(config, node=tuple(nodes))))
        load(file)
        super().__init__(file, folder)
        # Nodes that this process had forked; others may have their numbers later.
        self.nodes: list[psutil.Process] = []
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", fork_server.__name__),
                    *(str(file), str(folder), str(theirs.fileno())),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=huge_page_environment(os.environ),
                start_new_session=True,
            )

    async def fork(
        self, arguments: Sequence[str], listening: Sequence[int], log: IO[bytes]
    ) -> ForkedProcess:
        """See ``ForkServerClient``."""
        process = await self._fork(arguments, listening, log)
        self._forked(process.pid)
        return process

    def start(self, arguments: Sequence[str], log: IO[bytes]) -> ForkedNode:
        """Fork a node with these arguments that logs to ``log``, without an event loop."""
        assert self._requests is not None
        (stdin_end, stdin), (stdout, stdout_end), (status, status_end) = (
            os.pipe() for _ in range(3)
        )
        streams = [stdin_end, stdout_end, log.fileno(), status_end]
        socket.send_fds(self._requests, [msgspec.json.encode(arguments)], streams)
        for end in (stdin_end, stdout_end, status_end):
            os.close(end)
        node = ForkedNode(
            os.fdopen(stdin, "wb", buffering=0),
            os.fdopen(stdout, "rb"),
            os.fdopen(status, "rb", buffering=0),
        )
        self._forked(node.pid)
        return node

    def _forked(self, number: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.nodes.append(psutil.Process(number))

    async def close(self) -> None:
        """The server serves the next cluster; each cluster ends its own nodes."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """End the server."""
        assert self._requests is not None
        self._requests.close()
        self._process.wait(STOP_SECONDS)


def descendants() -> set[psutil.Process]:
    """Of this process, with nodes that the shared servers have forked for it, without those
    servers."""
    found = set(psutil.Process().children(recursive=True))
    for server in SERVERS.all.values():
        found -= {process for process in found if process.pid == server.pid}
        server.nodes = [node for node in server.nodes if node.is_running()]
        for node in server.nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {node, *node.children(recursive=True)}
    return found


class SharedForkServers:
    """In the place of ``ForkServerClient``: one shared server for each backend, which is started
    with the first cluster."""

    def __init__(self) -> None:
        self.all: dict[str, SharedForkServer] = {}

    def __call__(self, file: Path, folder: Path) -> ForkServerClient:
        return self.shared(load(file).target.path)

    def shared(self, path: str = str(BUNDLED_TARGET)) -> SharedForkServer:
        """The server for targets as that one, which is started if need be."""
        backend = registry.backend_name(path)
        if backend not in self.all:
            self.all[backend] = SharedForkServer(path)
        return self.all[backend]

    def stop(self) -> None:
        """End the servers."""
        for server in self.all.values():
            server.stop()


SERVERS = SharedForkServers()


def start_node(arguments: Sequence[str], log: IO[bytes]) -> ForkedNode | subprocess.Popen[bytes]:
    """``asyncspec-node`` with these arguments: forked where nodes are, else executed."""
    return SERVERS.shared().start(arguments, log) if FORKS else execute_node(arguments, log)


def execute_node(arguments: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """``asyncspec-node`` with these arguments, as a program of its own."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", cli.__name__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
    )


async def check_here(
    config: Config, requests: Sequence[CheckRequest], probed: StageStates
) -> list[Comparison]:
    """``asyncspec_nodes.reference.check.check`` in this process."""
    given = msgspec.json.encode(Task(config, tuple(requests), probed))
    return await asyncio.to_thread(compare_all, msgspec.json.decode(given, type=Task))
