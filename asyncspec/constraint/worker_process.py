"""The process that ``constraint.worker`` starts: it imports what the work needs, forks the child
that does it, and says which bound a child has met that died.

Single-threaded until the fork, and without the node's memory: a fork of the node would copy locks
that other threads hold. Systems without a fork start the child anew, which takes as long as the
imports, and have fewer bounds: the clock's, and the stack's.
"""

from __future__ import annotations

import importlib
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from asyncspec.constraint.worker import BoundError, Limits, Setup, Work, receive, send

WALL = 20.0
"""So many times the processor time a piece of work may take on the clock: it may wait for a core,
or never use one."""

CHILD = "child"
"""The argument of a ``SpawnedChild``."""

_MIB = 1 << 20


class Child:
    """A child that does work until it is ended, or meets a bound."""

    def __init__(self, limits: Limits, sink: IO[bytes], source: IO[bytes]) -> None:
        self._limits = limits
        self._out, self._in = sink, source

    def ask(self, message: bytes) -> bytes | None:
        """The answer; None where the child has died, or is to be ended."""
        try:
            send(self._out, message)
            return self._answer(WALL * self._limits.seconds)
        except (OSError, EOFError):
            return None

    def end(self) -> str:
        """Which bound it has met."""
        code = self._killed()
        for pipe in (self._out, self._in):
            with suppress(OSError):
                pipe.close()
        return _met(code, self._limits)

    def _answer(self, seconds: float) -> bytes | None:
        """None after so many seconds."""
        raise NotImplementedError

    def _killed(self) -> int:
        """Kill it; a child that has died already keeps its own exit code, which is returned."""
        raise NotImplementedError


class ForkedChild(Child):
    """A copy of this process, which has made ``work``."""

    def __init__(self, work: Work, limits: Limits) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(ours_out)
            os.close(ours_in)
            for descriptor in (0, 1):  # the parent's, whose end others must see
                os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            serve(work, limits, os.fdopen(theirs_in, "rb"), os.fdopen(theirs_out, "wb"))
        os.close(theirs_in)
        os.close(theirs_out)
        super().__init__(limits, os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb"))

    def _answer(self, seconds: float) -> bytes | None:
        return receive(self._in) if select.select([self._in], [], [], seconds)[0] else None

    def _killed(self) -> int:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class SpawnedChild(Child):
    """A process of its own, which makes its work by itself: where there is no fork."""

    def __init__(self, setup: Setup) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        super().__init__(setup.limits, self._process.stdin, self._process.stdout)
        # Such systems wait for sockets only, so that a thread waits for the pipe.
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        with suppress(OSError):
            send(self._out, msgspec.msgpack.encode(setup))
        # Imports are not the work's.
        self._answers.get()

    def _read(self) -> None:
        with suppress(OSError, EOFError, ValueError):
            while True:
                self._answers.put(receive(self._in))
        self._answers.put(None)

    def _answer(self, seconds: float) -> bytes | None:
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            return None

    def _killed(self) -> int:
        self._process.kill()
        return self._process.wait()


def _met(code: int, limits: Limits) -> str:
    """The bound of which a child's exit code tells."""
    stack = f"it is nested too deeply: more than {limits.stack // 1024} KiB of stack are needed"
    if sys.platform == "win32":
        killed, overflow = 1, 0xC00000FD  # TerminateProcess, STATUS_STACK_OVERFLOW
        bounds = {killed: f"it takes more than {limits.seconds * WALL:g} s", overflow: stack}
    else:
        bounds = {
            -signal.SIGPROF: f"it takes more than {limits.seconds:g} s of processor time",
            -signal.SIGKILL: f"it takes more than {limits.seconds * WALL:g} s",
            -signal.SIGSEGV: stack,
            -signal.SIGBUS: stack,
            -signal.SIGABRT: f"it takes more than {limits.mebibytes} MiB of memory",
        }
    return bounds.get(code, f"the process that looked at it has ended with code {code}")


def serve(work: Work, limits: Limits, source: IO[bytes], sink: IO[bytes]) -> None:
    """In the child, to its end."""
    _limit_memory(limits)
    threading.stack_size(limits.stack)
    answers: list[bytes] = []

    def run(message: bytes) -> None:
        try:
            answers.append(b"o" + work(message))
        except MemoryError:
            answers.append(f"bit takes more than {limits.mebibytes} MiB of memory".encode())
        except RecursionError:
            answers.append(b"bit is nested too deeply")
        except BoundError as error:
            answers.append(f"b{error}".encode())
        except BaseException as error:  # compilers written in Rust raise what is no Exception
            text = " ".join(str(error).split()) or type(error).__name__
            answers.append(b"e" + text.encode(errors="replace"))

    with suppress(EOFError, OSError):
        while True:
            message = receive(source)
            _limit_time(limits.seconds)
            thread = threading.Thread(target=run, args=(message,))
            thread.start()
            thread.join()
            _limit_time(0)
            send(sink, answers.pop())
    os._exit(0)


def _limit_time(seconds: float) -> None:
    """Processor time; 0: no bound. The signal's default action ends the process wherever it is."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory(limits: Limits) -> None:
    """Beyond what is mapped now; systems that cannot tell, or cannot bound it, do not."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + limits.mebibytes * _MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _made(setup: Setup) -> Work:
    module, _, name = setup.make.partition(":")
    work: Work = getattr(importlib.import_module(module), name)(setup.argument)
    return work


def _starter(setup: Setup) -> Callable[[], Child]:
    if not setup.forks:
        return lambda: SpawnedChild(setup)
    work = _made(setup)
    return lambda: ForkedChild(work, setup.limits)


def main(*arguments: str) -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    setup = msgspec.msgpack.decode(receive(source), type=Setup)
    if CHILD in arguments:
        work = _made(setup)
        send(sink, b"")
        serve(work, setup.limits, source, sink)
    start = _starter(setup)
    child: Child | None = None
    while True:
        try:
            message = receive(source)
        except EOFError:
            break
        child = child or start()
        answer = child.ask(message)
        if answer is None:
            answer, child = b"b" + child.end().encode(), None
        send(sink, answer)
    if child is not None:
        child.end()
    os._exit(0)  # at once, without an end of each module


if __name__ == "__main__":
    main(*sys.argv[1:])
