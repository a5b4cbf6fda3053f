"""One fork server for all local clusters of a test process: importing torch and transformers takes
seconds of processor time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from asyncspec.backend import registry
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.cluster.file import load, to_toml
from asyncspec_nodes.local import fork_server
from asyncspec_nodes.local.children import ForkedProcess, ForkServerClient
from asyncspec_nodes.local.cluster import FILE, local_config
from asyncspec_nodes.node.cli import huge_page_environment

STOP_SECONDS = 30.0
"""More than the server needs to end its nodes."""


class SharedForkServer(ForkServerClient):
    """A server that outlives the clusters whose nodes it forks."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="asyncspec-test-"))  # removed by the server
        target, draft = TargetTable(path=str(BUNDLED_TARGET)), DraftTable(source="none")
        file = folder / FILE
        file.write_text(to_toml(local_config(target, draft, 1, 1)))
        super().__init__(file, folder)
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
        return await self._fork(arguments, listening, log)

    async def close(self) -> None:
        """The server serves the next cluster; each cluster ends its own nodes."""

    def stop(self) -> None:
        """End the server."""
        assert self._requests is not None
        self._requests.close()
        self._process.wait(STOP_SECONDS)


class SharedForkServers:
    """In the place of ``ForkServerClient``: the shared server for Hugging Face targets, which is
    started with the first one, and servers of their own for others."""

    def __init__(self) -> None:
        self._shared: SharedForkServer | None = None

    def __call__(self, file: Path, folder: Path) -> ForkServerClient:
        if registry.backend_of(load(file).target.path) != registry.backend_of(str(BUNDLED_TARGET)):
            return ForkServerClient(file, folder)
        return self.shared()

    def shared(self) -> SharedForkServer:
        """The shared server, which is started if need be."""
        self._shared = self._shared or SharedForkServer()
        return self._shared

    def stop(self) -> None:
        """End the shared server."""
        if self._shared is not None:
            self._shared.stop()


SERVERS = SharedForkServers()
