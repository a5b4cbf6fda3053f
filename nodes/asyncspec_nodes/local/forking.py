"""Nodes that are forked from a process which has imported for all of them: the parent's side."""

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
from asyncspec_nodes.node.huge_pages import huge_page_environment

SUPPORTED = sys.platform == "linux"
"""Elsewhere there are no sockets of packets, or libraries that do not survive a fork."""


class ForkedProcess:
    """A forked node (see ``NodeProcess``). ``told``: where its exit code will come from; ``pipes``:
    what is to be closed at its end."""

    def __init__(
        self, pid: int, stdout: asyncio.StreamReader, told: asyncio.StreamReader, pipes: ExitStack
    ) -> None:
        self.pid = pid
        self.stdout = stdout
        self.close = pipes.close
        self._end = asyncio.create_task(self._ended(told))

    @property
    def returncode(self) -> int | None:
        """See ``NodeProcess``."""
        return self._end.result() if self._end.done() else None

    async def wait(self) -> int:
        """See ``NodeProcess``."""
        return await asyncio.shield(self._end)

    def terminate(self) -> None:
        """See ``NodeProcess``."""
        os.kill(self.pid, signal.SIGTERM)

    async def _ended(self, told: asyncio.StreamReader) -> int:
        try:
            return await _number(told)
        except asyncio.IncompleteReadError:
            # The server was killed, and nobody would hear of this node's end: it ends now.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            return -signal.SIGKILL


class ForkServerClient:
    """The server, from the first node on; another one if it was killed. ``file``: the cluster file,
    which says what to import; ``folder``: what is to go if this process is killed."""

    def __init__(self, file: Path, folder: Path) -> None:
        self._file = file
        self._folder = folder
        self._starting = asyncio.Lock()
        self._server: asyncio.subprocess.Process | None = None
        self._orders: socket.socket | None = None

    async def fork(
        self, arguments: Sequence[str], listening: Sequence[int], log: IO[bytes]
    ) -> ForkedProcess:
        """A node with these arguments, which serves on ``listening`` and writes to ``log``; so does
        the server, if it is the first. Raises ``ClusterError`` when the server ends instead, and
        ``OSError`` where this process has no room for pipes."""
        while True:
            fresh, server = await self._there(log)
            try:
                return await self._fork(arguments, listening, log)
            except (ConnectionError, asyncio.IncompleteReadError):
                await server.wait()
                if fresh:
                    why = f"what nodes are forked from has ended{last_line(Path(log.name))}"
                    raise ClusterError(why) from None

    async def close(self) -> None:
        """End the server, and what is left of its nodes."""
        # Told by a signal, not by the end of its orders: one that ends by itself just when it is
        # sent a signal would be waited for twice, of which asyncio warns.
        if self._server is not None:
            await end(self._server)
        if self._orders is not None:
            self._orders.close()

    async def _there(self, log: IO[bytes]) -> tuple[bool, asyncio.subprocess.Process]:
        """The server, and whether it was started just now."""
        async with self._starting:
            if self._server is not None and self._server.returncode is None:
                return False, self._server
            if self._orders is not None:
                self._orders.close()
            self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._server = await self._execute(theirs.fileno(), log)
            return True, self._server

    async def _execute(self, orders: int, log: IO[bytes]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a file in the user's directory must not stand in for a module
            "-m",
            fork_server.__name__,
            str(self._file),
            str(self._folder),
            str(orders),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(orders,),
            env=huge_page_environment(os.environ),
            # Ctrl-C in the terminal reaches only the parent, which stops its children.
            start_new_session=True,
        )

    async def _fork(
        self, arguments: Sequence[str], listening: Sequence[int], log: IO[bytes]
    ) -> ForkedProcess:
        assert self._orders is not None
        with ExitStack() as ours, ExitStack() as theirs:
            stdin_end, stdin = _pipe()
            theirs.enter_context(stdin_end)
            ours.enter_context(stdin)
            stdout, stdout_end = _pipe()
            theirs.enter_context(stdout_end)
            reports = await _reader(stdout, ours)
            told, told_end = _pipe()
            theirs.enter_context(told_end)
            news = await _reader(told, ours)
            streams = [file.fileno() for file in (stdin_end, stdout_end, log, told_end)]
            words = msgspec.json.encode(arguments)
            socket.send_fds(self._orders, [words], [*streams, *listening])
            theirs.close()
            pid = await _number(news)
            return ForkedProcess(pid, reports, news, ours.pop_all())


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    """Both ends, the one to read from first."""
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb", buffering=0), os.fdopen(writing, "wb", buffering=0)


async def _reader(pipe: IO[bytes], stack: ExitStack) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    stack.callback(transport.close)
    return reader


async def _number(told: asyncio.StreamReader) -> int:
    (number,) = INTEGER.unpack(await told.readexactly(INTEGER.size))
    return int(number)
