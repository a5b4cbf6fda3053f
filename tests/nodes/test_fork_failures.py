"""A node that cannot be forked costs no other node its life."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncspec_nodes.local import fork_server
from asyncspec_nodes.local.children import FORKS, ForkServerClient
from asyncspec_nodes.local.fork_server import ForkServer
from nodes.background import files_left

pytestmark = pytest.mark.skipif(not FORKS, reason="nodes are not forked on this system")


@contextlib.contextmanager
def server_of(requests: socket.socket) -> Iterator[ForkServer]:
    """A server in this process, which goes on without."""
    server = ForkServer(requests)
    with requests, server._woken, server._wakes:
        yield server


@pytest.fixture
def signals() -> Iterator[None]:
    """A server in this process changes what signals do."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGCHLD, signal.SIGTERM)}
    before = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(before)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def served(client: Callable[[ForkServerClient], Any], file: Path) -> None:
    """What ``client`` does with a server, which is this thread; the client's has a loop."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    forking = ForkServerClient(file, file.parent)
    forking._requests = ours
    forking._server = SimpleNamespace(returncode=None)  # type: ignore[assignment]
    failed: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(asyncio.wait_for(client(forking), 240))
        except BaseException as error:
            failed.append(error)
        finally:
            ours.close()

    thread = threading.Thread(target=work)
    with server_of(theirs) as server:
        thread.start()
        assert server.serve() is None
        thread.join()
    assert server.client_gone
    assert not failed


def test_a_fork_that_fails_is_told(
    signals: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing behind; the server serves on."""

    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async def client(forking: ForkServerClient) -> None:
        with (tmp_path / "log").open("wb") as log:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                with pytest.raises(BlockingIOError, match="temporarily unavailable"):
                    await forking.fork(["--rank", "1"], [], log)
            await asyncio.sleep(0)  # transports close their pipes in their own time
            await asyncio.sleep(0)
            assert len(os.listdir("/proc/self/fd")) <= before

    monkeypatch.setattr(os, "fork", fork)
    served(client, tmp_path / "cluster.toml")
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGCHLD}


@pytest.mark.parametrize("room", [0, 1, 4])
def test_a_server_without_room_for_a_request_says_so(room: int, tmp_path: Path) -> None:
    """As far as it can: with no pipe for its answer, the end of that pipe is the answer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reading, writing = os.pipe()
    with ours, server_of(theirs) as server, os.fdopen(reading, "rb", buffering=0) as answers:
        with open(os.devnull, "rb") as null:
            listening = [null.fileno()] * 2
            socket.send_fds(ours, [b'["--rank"]'], [*[null.fileno()] * 3, writing, *listening])
        os.close(writing)
        with files_left(room):
            assert server._receive() is None
        expected = fork_server.INTEGER.pack(-errno.EMFILE) if room == 4 else b""
        assert answers.read() == expected
        assert not server.client_gone
