"""The process that local nodes are forked from: it has imported once what all of them import.

Run as ``python -m asyncspec_nodes.local.fork_server FILE FOLDER DESCRIPTOR``: a cluster file, the
folder of the cluster's files, and a Unix socket of packets. Each packet on that is an order: a
node's arguments in JSON, and with it the node's standard streams, a pipe that is told its process
number and then its exit code (as ``subprocess`` has it; 8 bytes each), and maybe a listening
socket. When the socket ends, so do all nodes and this process; and as whoever ordered was killed,
who would have removed the folder, that goes as well.

``multiprocessing`` has such a server too. There every child runs the main module of whoever asked
once more, which may be any program that uses this package; and whoever asks waits until
everything is imported, and cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from setproctitle import setproctitle

from asyncspec_nodes.node import cli
from asyncspec_nodes.node.preload import preload

INTEGER = struct.Struct("=q")
"""A process number or an exit code, in a node's pipe."""

MAX_BYTES = 1 << 16
"""Of an order's arguments."""

_STREAMS = 3
_WOKEN_BY = (signal.SIGCHLD, signal.SIGTERM)


class ForkServer:
    """Takes orders on a socket; one thread, as a fork copies only one."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        # The pipes of the nodes that have not ended, by process number.
        self._pipes: dict[int, int] = {}
        self._woken, self._wakes = socket.socketpair()
        # Nobody is left who could order.
        self.alone = False

    def serve(self) -> list[str] | None:
        """In the server: None, when nobody can order any more and all nodes have ended. In a node
        that was forked: its arguments."""
        self._listen_to_signals()
        while True:
            ready, _, _ = select.select([self._orders, self._woken], [], [])
            if self._woken in ready and signal.SIGTERM in self._woken.recv(4096):
                break
            self._reap()
            if self._orders in ready:
                words, descriptors, _, _ = socket.recv_fds(self._orders, MAX_BYTES, 8)
                if not words:
                    self.alone = True
                    break
                arguments = msgspec.json.decode(words, type=list[str])
                if self._fork(descriptors):
                    return _as_node(arguments, descriptors)
        self._end()
        return None

    def _listen_to_signals(self) -> None:
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        for signum in _WOKEN_BY:
            signal.signal(signum, lambda signum, frame: None)

    def _fork(self, descriptors: Sequence[int]) -> bool:
        """Whether this is the new process."""
        pipe = descriptors[_STREAMS]
        # A signal to a new process that still has our handlers would wake us instead.
        signal.pthread_sigmask(signal.SIG_BLOCK, _WOKEN_BY)
        number = os.fork()
        if not number:
            self._forget()
            os.close(pipe)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WOKEN_BY)
        if not number:
            return True
        self._pipes[number] = pipe
        self._tell(pipe, number)
        for descriptor in descriptors:
            if descriptor != pipe:
                os.close(descriptor)
        return False

    def _forget(self) -> None:
        """In a new process: what is the server's alone."""
        signal.set_wakeup_fd(-1)
        for signum in _WOKEN_BY:
            signal.signal(signum, signal.SIG_DFL)
        for sock in (self._orders, self._woken, self._wakes):
            sock.close()
        for pipe in self._pipes.values():
            os.close(pipe)

    def _reap(self) -> None:
        """Say of the nodes that have ended how."""
        for number, pipe in tuple(self._pipes.items()):
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                del self._pipes[number]
                self._tell(pipe, os.waitstatus_to_exitcode(status))
                os.close(pipe)

    @staticmethod
    def _tell(pipe: int, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody is left who would want to know
            os.write(pipe, INTEGER.pack(number))

    def _end(self) -> None:
        for number in self._pipes:
            os.kill(number, signal.SIGKILL)
        for number in self._pipes:
            os.waitpid(number, 0)


def _as_node(arguments: list[str], descriptors: Sequence[int]) -> list[str]:
    """What a node's process is that a new Python would have made; its arguments."""
    os.setsid()
    for stream, descriptor in enumerate(descriptors[:_STREAMS]):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    for listening in descriptors[_STREAMS + 1 :]:
        arguments += ["--listen-fd", str(listening)]
    setproctitle(" ".join(["asyncspec-node", *arguments]))
    return arguments


def main() -> None:
    """The process."""
    file, folder, descriptor = sys.argv[1:]
    preload(Path(file))
    server = ForkServer(socket.socket(fileno=int(descriptor)))
    arguments = server.serve()
    if arguments is not None:
        cli.entry(arguments)
    if server.alone:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # without taking torch apart


if __name__ == "__main__":
    main()
