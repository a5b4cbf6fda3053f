"""Child processes that are nodes: started, listened to, watched, and stopped without remains."""

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
    """A node's process, however it was started."""

    @property
    def stdout(self) -> asyncio.StreamReader: ...

    def close(self) -> None:
        """Close its pipes."""


class ChildNode:
    """One node process. Its stdin is a pipe that is never written to: when this process ends,
    however it ends, the child reads the end of it and stops."""

    def __init__(self, rank: int, role: Role, process: NodeProcess, log: Path) -> None:
        self.rank = rank
        self.role: Role = role
        self.process = process
        self.serving: ReadyReport | None = None
        self._trouble: FailureReport | None = None
        self._log = log

    @property
    def name(self) -> str:
        """What a user calls it."""
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
        """Start a node that serves on ``sock``, or else where its cluster file says. ``prefix``:
        words before the command, which keep its process number; ``forking``: it is forked instead;
        ``again``: its log goes on. Raises ``ClusterError`` where that cannot be."""
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
        except OSError as error:  # no room for pipes, say
            raise ClusterError(f"{name_of(rank, role)} cannot be started: {error}") from None
        return cls(rank, role, process, log)

    async def watch(self, progress: Callable[[Report], None]) -> AsyncSpecError:
        """Pass on reports until the child ends. Returns what its end means."""
        async for line in lines(self.process.stdout):
            with contextlib.suppress(msgspec.DecodeError):
                report = read_report(line)
                if isinstance(report, FailureReport):
                    self._trouble = report
                elif isinstance(report, ReadyReport):
                    self.serving = report
                progress(report)
        return self._meaning(await self.process.wait())

    def _meaning(self, code: int) -> AsyncSpecError:
        if self._trouble is not None:
            if self._trouble.kind == "user":
                return UserError(self._trouble.text)
            return ClusterError(f"{self.name} failed: {self._trouble.text}")
        if code < 0:
            return ClusterError(f"{self.name} was killed by {signal.Signals(-code).name}")
        return ClusterError(f"{self.name} has ended with code {code}{last_line(self._log)}")

    async def stop(self) -> None:
        """End the process and whatever it has started."""
        await end(self.process)
        self.process.close()


def name_of(rank: int, role: Role) -> str:
    """What a user calls a node."""
    names = {"draft": "the draft node", "source": "the token source"}
    return names.get(role, f"stage {rank}")


class _Executed:
    """A new Python (see ``NodeProcess``)."""

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
        """See ``NodeProcess``."""
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
        # Ctrl-C in the terminal reaches only the parent, which stops its children.
        start_new_session=True,
    )
    return _Executed(process)
