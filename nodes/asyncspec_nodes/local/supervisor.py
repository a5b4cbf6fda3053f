"""Child processes that are nodes: started, listened to, watched, and stopped without remains."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from asyncspec.errors import AsyncSpecError, ClusterError, UserError
from asyncspec_nodes.node.reports import Report, Serving, Trouble, read_report
from asyncspec_protocol.ids import Rank, draft_number
from asyncspec_protocol.messages import Role

STOP_SECONDS = 5.0
"""How long a child may take to stop before it is killed."""


class Child:
    """One node process. Its stdin is a pipe that is never written to: when this process ends,
    however it ends, the child reads the end of it and stops."""

    def __init__(
        self, rank: int, role: Role, process: asyncio.subprocess.Process, log: Path
    ) -> None:
        self.rank = rank
        self.role: Role = role
        self.process = process
        self.serving: Serving | None = None
        self._trouble: Trouble | None = None
        self._log = log

    @property
    def name(self) -> str:
        """What a user calls it."""
        names = {"draft": "the draft node", "source": "the token source"}
        return names.get(self.role, f"stage {self.rank}")

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
        again: bool = False,
    ) -> Child:
        """Start a node that serves on ``sock``, or else where its cluster file says. ``prefix``:
        words before the command, which keep its process number; ``again``: its log goes on."""
        # -P: a file in the user's directory must not stand in for a module.
        command = [*prefix, sys.executable, "-P", "-m", "asyncspec_nodes.node.cli", "--role", role]
        number = draft_number(Rank(rank)) if role == "draft" else rank
        command += ["--rank", str(number), "--config", str(config), "--supervised"]
        inherited = () if sock is None else (sock.fileno(),)
        for descriptor in inherited:
            command += ["--listen-fd", str(descriptor)]
        with log.open("ab" if again else "wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                pass_fds=inherited,
                # Ctrl-C in the terminal reaches only the parent, which stops its children.
                start_new_session=True,
            )
        return cls(rank, role, process, log)

    async def watch(self, progress: Callable[[Report], None]) -> AsyncSpecError:
        """Pass on reports until the child ends. Returns what its end means."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            with contextlib.suppress(msgspec.DecodeError):
                report = read_report(line)
                if isinstance(report, Trouble):
                    self._trouble = report
                elif isinstance(report, Serving):
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
        lines = self._log.read_text(errors="replace").strip().splitlines()
        why = f" ({lines[-1].strip()})" if lines else ""
        return ClusterError(f"{self.name} has ended with code {code}{why}")

    async def stop(self) -> None:
        """End the process and whatever it has started."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self.process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
