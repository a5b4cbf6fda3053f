"""The process that local nodes are forked from, after importing what all nodes import.

``python -m asyncspec_nodes.local.fork_server FILE FOLDER DESCRIPTOR``: a cluster file, the folder
of the cluster's temporary files, and a Unix SEQPACKET socket. Each packet is a request: a node's
arguments as JSON, with its standard streams, a status pipe, and optionally a listening socket. The
status pipe receives the process id and later the exit code (8 bytes each); where there is no new
process, the system's error number, negative. When the socket closes, the client was killed: all
nodes and this process end, and the folder is removed.

Unlike ``multiprocessing.forkserver`` it does not run the client's main module in every child, and
the client does not block while modules are imported.
"""

from __future__ import annotations

import contextlib
import errno
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

INTEGER = struct.Struct("=q")
"""A process id or an exit code in the status pipe."""

MAX_BYTES = 1 << 16
"""Bytes of a request."""

_STREAMS = 3
_WOKEN_BY = (signal.SIGCHLD, signal.SIGTERM)


class ForkServer:
    """Serves requests on a socket; single-threaded, because a fork copies one thread only."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        # Status pipes of running nodes, by process id.
        self._pipes: dict[int, int] = {}
        self._woken, self._wakes = socket.socketpair()
        # The client has closed its end.
        self.client_gone = False

    def serve(self) -> list[str] | None:
        """In the server: None, once all nodes have ended. In a forked node: its arguments."""
        self._listen_to_signals()
        while True:
            ready, _, _ = select.select([self._requests, self._woken], [], [])
            if self._woken in ready and signal.SIGTERM in self._woken.recv(4096):
                break
            self._reap()
            if self._requests in ready:
                arguments = self._receive()
                if arguments is not None:
                    return arguments
                if self.client_gone:
                    break
        self._end()
        return None

    def _receive(self) -> list[str] | None:
        """Take a request, or note that the client is gone. In a forked node: its arguments."""
        words, descriptors, flags, _ = socket.recv_fds(self._requests, MAX_BYTES, 8)
        if not words:
            self.client_gone = True
        elif flags & socket.MSG_CTRUNC:  # there is no room for all of them in this process
            self._refuse(descriptors, errno.EMFILE)
        elif self._fork(descriptors):
            return _as_node(msgspec.json.decode(words, type=list[str]), descriptors)
        return None

    def _refuse(self, descriptors: Sequence[int], error: int) -> None:
        """End a request that fails, and no other node with it."""
        sys.stderr.write(f"no node is forked: {os.strerror(error)}\n")
        sys.stderr.flush()
        if len(descriptors) > _STREAMS:
            self._report(descriptors[_STREAMS], -error)
        for descriptor in descriptors:
            os.close(descriptor)

    def _listen_to_signals(self) -> None:
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        for signum in _WOKEN_BY:
            signal.signal(signum, lambda signum, frame: None)

    def _fork(self, descriptors: Sequence[int]) -> bool:
        """True in the new process. Where there is none, the request is refused."""
        pipe = descriptors[_STREAMS]
        # Until the child resets its handlers, a signal to it would wake the server.
        signal.pthread_sigmask(signal.SIG_BLOCK, _WOKEN_BY)
        try:
            number = os.fork()
        except OSError as error:  # for now there is no memory, or too many processes
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WOKEN_BY)
            self._refuse(descriptors, error.errno or errno.EAGAIN)
            return False
        if not number:
            self._release_server()
            os.close(pipe)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WOKEN_BY)
        if not number:
            return True
        self._pipes[number] = pipe
        self._report(pipe, number)
        for descriptor in descriptors:
            if descriptor != pipe:
                os.close(descriptor)
        return False

    def _release_server(self) -> None:
        """In the new process: release the server's handlers and descriptors."""
        signal.set_wakeup_fd(-1)
        for signum in _WOKEN_BY:
            signal.signal(signum, signal.SIG_DFL)
        for sock in (self._requests, self._woken, self._wakes):
            sock.close()
        for pipe in self._pipes.values():
            os.close(pipe)

    def _reap(self) -> None:
        """Report the exit codes of ended nodes."""
        for number, pipe in tuple(self._pipes.items()):
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                del self._pipes[number]
                self._report(pipe, os.waitstatus_to_exitcode(status))
                os.close(pipe)

    @staticmethod
    def _report(pipe: int, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, INTEGER.pack(number))

    def _end(self) -> None:
        for number in self._pipes:
            os.kill(number, signal.SIGKILL)
        for number in self._pipes:
            os.waitpid(number, 0)


def _as_node(arguments: list[str], descriptors: Sequence[int]) -> list[str]:
    """Set up session, streams and title as a new interpreter would; the node's arguments."""
    os.setsid()
    for stream, descriptor in enumerate(descriptors[:_STREAMS]):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    for listening in descriptors[_STREAMS + 1 :]:
        arguments += ["--listen-fd", str(listening)]
    setproctitle(" ".join(["asyncspec-node", *arguments]))
    return arguments


def main() -> None:
    file, folder, descriptor = sys.argv[1:]
    cli.preload(Path(file))
    server = ForkServer(socket.socket(fileno=int(descriptor)))
    arguments = server.serve()
    if arguments is not None:
        cli.entry(arguments)
    if server.client_gone:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # skips torch's slow teardown


if __name__ == "__main__":
    main()
