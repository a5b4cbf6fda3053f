"""The draft node of a cluster without a file, as a process of its first machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

from asyncspec.core.errors import AsyncSpecError, UserError
from asyncspec_nodes.local.children import ChildNode
from asyncspec_nodes.local.cluster import RESTART_ALL
from asyncspec_nodes.node.reports import Report


class DraftProcess:
    """``file``: the cluster file, beside which it logs; ``changed`` is called at its reports."""

    def __init__(
        self,
        file: Path,
        sock: socket.socket,
        changed: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        # Whether it has loaded once.
        self.ready = False
        self._file = file
        self._sock = sock
        self._changed = changed
        self._say = say

    async def run(self) -> AsyncSpecError:
        """Keep it running; why it has ended for good."""
        taken: list[float] = []
        log = self._file.with_name("rank-0.log")
        while True:
            child = await ChildNode.start(
                0, "draft", self._file, self._sock, log, again=bool(taken)
            )

            def report(report: Report, child: ChildNode = child) -> None:
                self.ready = self.ready or child.ready is not None
                self._changed()

            try:
                error = await child.watch(report)
            finally:
                await child.stop()
            if isinstance(error, UserError) or not RESTART_ALL.take(taken, time.monotonic()):
                return error
            self._say(f"{error}; it is started again")
