"""Node processes, executed or forked: started, watched, stopped with all their subprocesses."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import msgspec

from asyncspec.backend.threads import COUNT_VARIABLES
from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError
from asyncspec_nodes.cluster.control_groups import MemoryKills
from asyncspec_nodes.local import fork_server
from asyncspec_nodes.local.fork_server import INTEGER
from asyncspec_nodes.node.cli import huge_page_environment
from asyncspec_nodes.node.reports import (
    ALIVE_SECONDS,
    FailureReport,
    HandReport,
    ReadyReport,
    ReportSink,
    read_report,
)
from asyncspec_nodes.node.supervisor import HUNG_SECONDS, how_ended
from asyncspec_nodes.node.supervisor import Again as Again
from asyncspec_protocol.ids import Rank, draft_number
from asyncspec_protocol.messages import Role

FORKS = sys.platform == "linux"
"""macOS has no SEQPACKET Unix sockets, and its libraries do not survive a fork."""

STOP_SECONDS = 5.0
"""Time to stop before SIGKILL."""

MAX_REPORT_BYTES = 1 << 26
"""Bytes of one line; an error report may hold much of a peer's text."""


async def end(process: asyncio.subprocess.Process | ForkedProcess) -> None:
    """End a process and the process group that it leads."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def last_line(log: Path) -> str:
    """`` (LAST LINE)`` of a log, to append to an error; empty where there is none."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return f" ({lines[-1].strip()})" if lines else ""


class ChildNode:
    """One node. Its stdin is a pipe that is never written to: when this process ends, even by
    SIGKILL, the node reads end-of-file and stops."""

    def __init__(
        self, rank: int, role: Role, process: asyncio.subprocess.Process | ForkedProcess, log: Path
    ) -> None:
        self.rank = rank
        self.role: Role = role
        self.process = process
        self.ready: ReadyReport | None = None
        # It has a request.
        self.in_hand = False
        # How it has ended.
        self.end: Again = ""
        self._kills = MemoryKills()
        self._failure: FailureReport | None = None
        self._hung = False
        self._log = log

    @classmethod
    async def start(
        cls,
        rank: int,
        role: Role,
        config: Path,
        sock: socket.socket | None,
        log: Path,
        *,
        prefix: Sequence[str] = (),
        forking: ForkServerClient | None = None,
        again: Again = "",
    ) -> ChildNode:
        """Start a node that listens on ``sock``, or on its cluster file's address. ``prefix``:
        words before the command, which must exec it; ``forking``: fork it instead; ``again``:
        append to its log, and tell it how the one before has ended. Raises ``ClusterError``."""
        number = draft_number(Rank(rank)) if role == "draft" else rank
        arguments = ["--role", role, "--rank", str(number), "--config", str(config), "--supervised"]
        if again:
            arguments += ["--again", again]
        listening = () if sock is None else (sock.fileno(),)
        process: asyncio.subprocess.Process | ForkedProcess
        try:
            with log.open("ab" if again else "wb") as stderr:
                if forking is not None:
                    process = await forking.fork(arguments, listening, stderr)
                else:
                    # -P: a file in the user's directory must not stand in for a module.
                    process = await asyncio.create_subprocess_exec(
                        *(*prefix, sys.executable, "-P", "-m", "asyncspec_nodes.node.cli"),
                        *(*arguments, *(f"--listen-fd={descriptor}" for descriptor in listening)),
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=stderr,
                        limit=MAX_REPORT_BYTES,
                        pass_fds=listening,
                        # Ctrl-C in the terminal signals only the parent, which stops its children.
                        start_new_session=True,
                    )
        except OSError as error:  # for example, too many open files
            raise ClusterError(f"{name_of(rank, role)} cannot be started: {error}") from None
        return cls(rank, role, process, log)

    async def watch(self, progress: ReportSink) -> AsyncSpecError:
        """Pass reports to ``progress`` until the node ends. Returns the error to report."""
        async for line in self._lines():
            with contextlib.suppress(msgspec.DecodeError):
                report = read_report(line)
                if isinstance(report, FailureReport):
                    self._failure = report
                elif isinstance(report, ReadyReport):
                    self.ready = report
                elif isinstance(report, HandReport):
                    self.in_hand = report.some
                progress(report)
        code = await self.process.wait()
        in_hand = self.in_hand and not self._hung
        self.end = how_ended(code, in_hand=in_hand, out_of_memory=self._kills.risen)
        return self._error_of(code)

    async def _lines(self) -> AsyncIterator[bytes]:
        """What the node reports. One that has served and is silent for too long is killed; while
        this process was stopped itself, no time has passed."""
        assert self.process.stdout is not None
        silent = 0.0
        while True:
            self._kills.look(Path(f"/proc/{self.process.pid}/cgroup"), time.monotonic())
            try:
                async with asyncio.timeout(ALIVE_SECONDS):
                    line = await self.process.stdout.readline()
            except TimeoutError:
                silent += ALIVE_SECONDS
                if self.ready is not None and silent > HUNG_SECONDS and not self._hung:
                    self._hung = True
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self.process.pid, signal.SIGKILL)
                continue
            if not line:
                return
            silent = 0.0
            yield line

    def _error_of(self, code: int) -> AsyncSpecError:
        name = name_of(self.rank, self.role)
        if self._hung:
            seconds = f"{HUNG_SECONDS:g} s"
            return ClusterError(f"{name} was stopped, or hung, for {seconds}, and was killed")
        if self._failure is not None:
            if self._failure.kind == "user":
                return UserError(self._failure.text)
            return ClusterError(f"{name} failed: {self._failure.text}")
        if self.end == "oom_killed":
            return ClusterError(f"{name} was ended by the kernel for want of memory")
        if code < 0:
            return ClusterError(f"{name} was killed by {signal.Signals(-code).name}")
        return ClusterError(f"{name} has ended with code {code}{last_line(self._log)}")

    async def stop(self) -> None:
        """End the process and its subprocesses."""
        await end(self.process)
        if isinstance(self.process, ForkedProcess):
            self.process.close()


def name_of(rank: int, role: Role) -> str:
    """A node's name in messages."""
    names = {"draft": "the draft node", "source": "the token source"}
    return names.get(role, f"stage {rank}")


class ForkedProcess:
    """A forked node. ``status``: the pipe with its exit code; ``pipes``: closed by ``close``."""

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
    file, which decides what to import; ``folder``: removed if this process is killed; ``threads``:
    of each node's products, None: as the file and the environment say."""

    def __init__(self, file: Path, folder: Path, threads: int | None = None) -> None:
        self._file = file
        self._folder = folder
        self._threads = {} if threads is None else dict.fromkeys(COUNT_VARIABLES, str(threads))
        self._starting = asyncio.Lock()
        self._server: asyncio.subprocess.Process | None = None
        self._requests: socket.socket | None = None

    async def prepare(self, log: Path) -> None:
        """Start the server before there is a node. Raises ``OSError``."""
        with log.open("ab") as stream:
            await self._ensure_server(stream)

    async def fork(
        self, arguments: Sequence[str], listening: Sequence[int], log: IO[bytes]
    ) -> ForkedProcess:
        """Fork a node with these arguments that listens on ``listening``; it and a new server log
        to ``log``. Raises ``ClusterError`` where the server ends, ``OSError`` where the system has
        no more pipes or processes."""
        while True:
            fresh, server = await self._ensure_server(log)
            try:
                return await self._fork(arguments, listening, log)
            except (ConnectionError, asyncio.IncompleteReadError):
                try:
                    async with asyncio.timeout(STOP_SECONDS):
                        await server.wait()
                except TimeoutError:  # it could not even receive the pipe for its answer
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from None
                if fresh:
                    why = f"what nodes are forked from has ended{last_line(Path(log.name))}"
                    raise ClusterError(why) from None

    async def imported(self, log: Path) -> None:
        """Wait until the server has imported what nodes need. Raises as ``fork``."""
        with log.open("ab") as stream:
            process = await self.fork(("--version",), (), stream)
        await process.wait()
        process.close()

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
                self._server = await asyncio.create_subprocess_exec(
                    # -P: a file in the user's directory must not stand in for a module.
                    *(sys.executable, "-P", "-m", fork_server.__name__),
                    *(str(self._file), str(self._folder), str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    env=huge_page_environment({**os.environ, **self._threads}),
                    # Ctrl-C in the terminal signals only the parent, which stops its children.
                    start_new_session=True,
                )
            return True, self._server

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
            if (pid := await _number(numbers)) < 0:
                raise OSError(-pid, os.strerror(-pid))
            return ForkedProcess(pid, reports, numbers, ours.pop_all())


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    """Read end and write end."""
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb", buffering=0), os.fdopen(writing, "wb", buffering=0)


async def _reader(pipe: IO[bytes], stack: ExitStack) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=MAX_REPORT_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    stack.callback(transport.close)
    return reader


async def _number(status: asyncio.StreamReader) -> int:
    (number,) = INTEGER.unpack(await status.readexactly(INTEGER.size))
    return int(number)
