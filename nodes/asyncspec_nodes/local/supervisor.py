"""Node processes: started, watched by their reports, stopped with all their subprocesses."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

import msgspec

from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError
from asyncspec_nodes.local.forking import ForkServerClient
from asyncspec_nodes.local.processes import Process, end, last_line, lines
from asyncspec_nodes.node.reports import FailureReport, ReadyReport, Report, read_report
from asyncspec_protocol.ids import Rank, draft_number
from asyncspec_protocol.messages import Role


class NodeProcess(Process, Protocol):
    """A node's process, executed or forked."""

    @property
    def stdout(self) -> asyncio.StreamReader: ...

    def close(self) -> None:
        """Close its pipes."""


class ChildNode:
    """One node. Its stdin is a pipe that is never written to: when this process ends, even by
    SIGKILL, the node reads end-of-file and stops."""

    def __init__(self, rank: int, role: Role, process: NodeProcess, log: Path) -> None:
        self.rank = rank
        self.role: Role = role
        self.process = process
        self.ready: ReadyReport | None = None
        self._failure: FailureReport | None = None
        self._log = log

    @property
    def name(self) -> str:
        return name_of(self.rank, self.role)

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
        again: bool = False,
    ) -> ChildNode:
        """Start a node that listens on ``sock``, or on its cluster file's address. ``prefix``:
        words before the command, which must exec it; ``forking``: fork it instead; ``again``:
        append to its log. Raises ``ClusterError``."""
        number = draft_number(Rank(rank)) if role == "draft" else rank
        arguments = ["--role", role, "--rank", str(number), "--config", str(config), "--supervised"]
        listening = () if sock is None else (sock.fileno(),)
        process: NodeProcess
        try:
            with log.open("ab" if again else "wb") as stderr:
                if forking is None:
                    process = await _execute(prefix, arguments, listening, stderr)
                else:
                    process = await forking.fork(arguments, listening, stderr)
        except OSError as error:  # for example, too many open files
            raise ClusterError(f"{name_of(rank, role)} cannot be started: {error}") from None
        return cls(rank, role, process, log)

    async def watch(self, progress: Callable[[Report], None]) -> AsyncSpecError:
        """Pass reports to ``progress`` until the node ends. Returns the error to report."""
        async for line in lines(self.process.stdout):
            with contextlib.suppress(msgspec.DecodeError):
                report = read_report(line)
                if isinstance(report, FailureReport):
                    self._failure = report
                elif isinstance(report, ReadyReport):
                    self.ready = report
                progress(report)
        return self._error_of(await self.process.wait())

    def _error_of(self, code: int) -> AsyncSpecError:
        if self._failure is not None:
            if self._failure.kind == "user":
                return UserError(self._failure.text)
            return ClusterError(f"{self.name} failed: {self._failure.text}")
        if code < 0:
            return ClusterError(f"{self.name} was killed by {signal.Signals(-code).name}")
        return ClusterError(f"{self.name} has ended with code {code}{last_line(self._log)}")

    async def stop(self) -> None:
        """End the process and its subprocesses."""
        await end(self.process)
        self.process.close()


def name_of(rank: int, role: Role) -> str:
    """A node's name in messages."""
    names = {"draft": "the draft node", "source": "the token source"}
    return names.get(role, f"stage {rank}")


class _Executed:
    """A ``NodeProcess`` in a new interpreter."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self.stdout = process.stdout
        self.terminate = process.terminate
        self.wait = process.wait
        self.close = process.stdin.close
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.returncode


async def _execute(
    prefix: Sequence[str], arguments: Sequence[str], listening: Sequence[int], log: IO[bytes]
) -> _Executed:
    # -P: a file in the user's directory must not stand in for a module.
    command = [*prefix, sys.executable, "-P", "-m", "asyncspec_nodes.node.cli", *arguments]
    for descriptor in listening:
        command += ["--listen-fd", str(descriptor)]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        pass_fds=listening,
        # Ctrl-C in the terminal signals only the parent, which stops its children.
        start_new_session=True,
    )
    return _Executed(process)
