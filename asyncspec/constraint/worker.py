"""Strangers' programs in a process of their own: grammars that compilers read, and templates.

A compiler that overflows its stack, or takes all memory, ends its process, and no thread can be
stopped from outside. So the work is done in a child of a small process (``worker_process``) that
has imported what it needs and forks the child again where one has died, which takes milliseconds.
Time is the child's own processor time, so that a busy machine refuses nothing.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO

import msgspec
from msgspec import Struct

LENGTH = struct.Struct("=Q")
"""Before each message of either side."""

STACK_BYTES = 1 << 20
"""Stack size of the working thread: an eighth of what threads have here, so that what passes does
so again in the node's own threads."""

Work = Callable[[bytes], bytes]


class Limits(Struct, frozen=True):
    """What one piece of work may take."""

    # Processor time.
    seconds: float
    # Beyond what the process has at its start.
    mebibytes: int
    stack: int = STACK_BYTES


class Setup(Struct, frozen=True):
    """The first message: what the child does. ``make`` names a function, ``module:name``, which
    takes ``argument`` and returns a ``Work``."""

    make: str
    argument: bytes
    limits: Limits
    # The child is forked; else it is started anew after each end.
    forks: bool = True


class BoundError(ValueError):
    """Work that was ended; the message says which bound it met."""


class Worker:
    """Does one kind of work, started with the first piece. Thread-safe: one piece at a time.
    ``argument`` is called for what ``Setup.make`` takes; ``forks``: see ``Setup``."""

    def __init__(
        self,
        make: str,
        argument: Callable[[], bytes],
        limits: Limits,
        *,
        forks: bool = hasattr(os, "fork"),
    ) -> None:
        self._forks = forks
        self._make = make
        self._argument = argument
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, work: bytes) -> bytes:
        """Raises ``BoundError``, and ``ValueError`` as the work does."""
        with self._lock:
            for _ in range(2):
                try:
                    status, answer = self._asked(work)
                except (OSError, EOFError):  # the process was killed from outside
                    self._end()
                    continue
                if status == b"o":
                    return answer
                raise (BoundError if status == b"b" else ValueError)(answer.decode())
        raise BoundError("the process that looks at it ends again and again")

    def close(self) -> None:
        """End the process. Work that is being done goes on in a new one."""
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()
        elif (process := self._process) is not None:
            process.kill()

    def __del__(self) -> None:
        self._end()

    def _asked(self, work: bytes) -> tuple[bytes, bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._start()
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        send(stdin, work)
        answer = receive(stdout)
        return answer[:1], answer[1:]

    def _start(self) -> None:
        setup = Setup(self._make, self._argument(), self._limits, self._forks)
        # Forked from the process's one thread: libraries must not start more.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            # -P: a file in the user's directory must not stand in for a module.
            [sys.executable, "-P", "-m", "asyncspec.constraint.worker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **threads},
            # Ctrl-C in the terminal signals only the parent; at its end stdin ends.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        send(self._process.stdin, msgspec.msgpack.encode(setup))

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        process.kill()
        process.wait()


def send(pipe: IO[bytes], message: bytes) -> None:
    """A message with its length."""
    pipe.write(LENGTH.pack(len(message)) + message)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes:
    """Raises ``EOFError`` at the end of the pipe."""
    (length,) = LENGTH.unpack(_exactly(pipe, LENGTH.size))
    return _exactly(pipe, length)


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    data: bytes = pipe.read(count)
    if len(data) < count:
        raise EOFError
    return data
