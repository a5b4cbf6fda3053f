"""Starts machines on a Ray cluster, and says what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict

from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError
from asyncspec_nodes.console.signals import unless_failed
from asyncspec_nodes.plugins.join.ray import driver
from asyncspec_nodes.plugins.join.ray.messages import (
    Fault,
    Notice,
    Order,
    Placed,
    RayOptions,
    Report,
)

T = TypeVar("T")

STOP_SECONDS = 10.0
"""For Ray to end its actors."""


def check_installed() -> None:
    """Raises ``UserError`` where Ray is not installed."""
    if find_spec("ray") is None:
        raise UserError("--ray needs Ray; install it with pip install 'asyncspec[ray]'")


class RayLauncher:
    """``async with``: machines join by ``start``; leaving ends them."""

    def __init__(
        self,
        options: RayOptions,
        notify: Callable[[str], None],
        program: Sequence[str] = (sys.executable, "-P", "-m", driver.__name__),
    ) -> None:
        """``notify`` receives a line for each event."""
        self._options, self._program = options, program
        self._notify = notify
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Future[AsyncSpecError] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> RayLauncher:
        return self

    async def __aexit__(self, *exception: object) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
        for task in self._tasks:
            task.cancel()

    def start(self, token: object) -> None:
        """Let machines join the cluster of ``token``."""
        task = asyncio.create_task(self._run(str(token)))
        self._tasks.add(task)

    async def while_it_runs(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns. Raises why no machine can join any more, if that comes first."""

        async def ended() -> AsyncSpecError:
            return await asyncio.shield(self._ended)

        return await unless_failed(work, ended())

    async def _run(self, token: str) -> None:
        process = self._process = await asyncio.create_subprocess_exec(
            *self._program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ray describes every lost node in many lines; it keeps them in its own logs.
            stderr=asyncio.subprocess.DEVNULL,
            # Ctrl-C in the terminal signals only the parent, which ends its children.
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        order = Order(token=token, **asdict(self._options))
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        error: AsyncSpecError | None = None
        async for line in process.stdout:
            with contextlib.suppress(msgspec.DecodeError):
                report: Report = msgspec.json.decode(line, type=Report)
                match report:
                    case Placed(nodes):
                        self._notify(f"Ray starts {nodes} machines")
                    case Notice(text):
                        self._notify(text)
                    case Fault(text, user):
                        error = UserError(text) if user else ClusterError(text)
        code = await process.wait()
        if not self._ended.done():
            self._ended.set_result(error or ClusterError(f"Ray's driver has ended with {code}"))
