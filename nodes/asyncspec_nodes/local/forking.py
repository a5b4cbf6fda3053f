"""Client of the fork server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import msgspec

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.local import fork_server
from asyncspec_nodes.local.fork_server import INTEGER
from asyncspec_nodes.local.processes import end, last_line
from asyncspec_nodes.node.cli import huge_page_environment

SUPPORTED = sys.platform == "linux"
"""macOS has no SEQPACKET Unix sockets, and its libraries do not survive a fork."""


class ForkedProcess:
    """A forked ``NodeProcess``. ``status``: the pipe that delivers its exit code; ``pipes``: closed
    at its end."""

    def __init__(
        self, pid: int, stdout: asyncio.StreamReader, status: asyncio.StreamReader, pipes: ExitStack
    ) -> None:
        self.pid = pid
        self.stdout = stdout
        self.close = pipes.close
        self._end = asyncio.create_task(self._ended(status))

    @property
    def returncode(self) -> int | None:
        return self._end.result() if self._end.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    async def _ended(self, status: asyncio.StreamReader) -> int:
        try:
            return await _number(status)
        except asyncio.IncompleteReadError:
            # The server was killed, so this node's end could not be noticed: end it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            return -signal.SIGKILL


class ForkServerClient:
    """Starts the server with the first node, and again if it was killed. ``file``: the cluster
    file, which decides what to import; ``folder``: removed if this process is killed."""

    def __init__(self, file: Path, folder: Path) -> None:
        self._file = file
        self._folder = folder
        self._starting = asyncio.Lock()
        self._server: asyncio.subprocess.Process | None = None
        self._requests: socket.socket | None = None

    async def fork(
        self, arguments: Sequence[str], listening: Sequence[int], log: IO[bytes]
    ) -> ForkedProcess:
        """Fork a node with these arguments that listens on ``listening``; it and a new server log
        to ``log``. Raises ``ClusterError`` where the server ends, ``OSError`` without pipes."""
        while True:
            fresh, server = await self._ensure_server(log)
            try:
                return await self._fork(arguments, listening, log)
            except (ConnectionError, asyncio.IncompleteReadError):
                await server.wait()
                if fresh:
                    why = f"what nodes are forked from has ended{last_line(Path(log.name))}"
                    raise ClusterError(why) from None

    async def close(self) -> None:
        """End the server and its remaining nodes."""
        # By a signal first: if it ended by itself at its socket's end, asyncio could warn that the
        # process is already reaped.
        if self._server is not None:
            await end(self._server)
        if self._requests is not None:
            self._requests.close()

    async def _ensure_server(self, log: IO[bytes]) -> tuple[bool, asyncio.subprocess.Process]:
        """Whether the server was started just now, and the server."""
        async with self._starting:
            if self._server is not None and self._server.returncode is None:
                return False, self._server
            if self._requests is not None:
                self._requests.close()
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._server = await self._execute(theirs.fileno(), log)
            return True, self._server

    async def _execute(self, requests: int, log: IO[bytes]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a file in the user's directory must not stand in for a module
            "-m",
            fork_server.__name__,
            str(self._file),
            str(self._folder),
            str(requests),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(requests,),
            env=huge_page_environment(os.environ),
            # Ctrl-C in the terminal signals only the parent, which stops its children.
            start_new_session=True,
        )

    async def _fork(
        self, arguments: Sequence[str], listening: Sequence[int], log: IO[bytes]
    ) -> ForkedProcess:
        assert self._requests is not None
        with ExitStack() as ours, ExitStack() as theirs:
            stdin_end, stdin = _pipe()
            theirs.enter_context(stdin_end)
            ours.enter_context(stdin)
            stdout, stdout_end = _pipe()
            theirs.enter_context(stdout_end)
            reports = await _reader(stdout, ours)
            status, status_end = _pipe()
            theirs.enter_context(status_end)
            numbers = await _reader(status, ours)
            streams = [file.fileno() for file in (stdin_end, stdout_end, log, status_end)]
            words = msgspec.json.encode(arguments)
            socket.send_fds(self._requests, [words], [*streams, *listening])
            theirs.close()
            pid = await _number(numbers)
            return ForkedProcess(pid, reports, numbers, ours.pop_all())


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    """Read end and write end."""
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb", buffering=0), os.fdopen(writing, "wb", buffering=0)


async def _reader(pipe: IO[bytes], stack: ExitStack) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    stack.callback(transport.close)
    return reader


async def _number(status: asyncio.StreamReader) -> int:
    (number,) = INTEGER.unpack(await status.readexactly(INTEGER.size))
    return int(number)
