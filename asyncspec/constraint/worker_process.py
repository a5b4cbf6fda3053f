"""The process that ``constraint.worker`` starts: it imports what the work needs, forks the child
that does it, and says which bound a child has met that died.

Single-threaded until the fork, and without the node's memory: a fork of the node would copy locks
that other threads hold.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from asyncspec.constraint.worker import BoundError, Limits, Setup, Work, receive, send

WALL = 20.0
"""So many times the processor time a piece of work may take on the clock: it may wait for a core,
or never use one."""

_MIB = 1 << 20


class Child:
    """A forked child that does ``work`` until it is ended, or meets a bound."""

    def __init__(self, work: Work, limits: Limits) -> None:
        self._limits = limits
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(ours_out)
            os.close(ours_in)
            for descriptor in (0, 1):  # the parent's, whose end others must see
                os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            _serve(work, limits, os.fdopen(theirs_in, "rb"), os.fdopen(theirs_out, "wb"))
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb")

    def ask(self, message: bytes) -> bytes | None:
        """The answer; None where the child has died, or is dead now."""
        try:
            send(self._out, message)
            if select.select([self._in], [], [], WALL * self._limits.seconds)[0]:
                return receive(self._in)
        except (OSError, EOFError):
            pass
        return None

    def end(self) -> str:
        """Which bound it has met."""
        with suppress(ProcessLookupError):
            # A child that has died already keeps its own status.
            os.kill(self.pid, signal.SIGKILL)
        for pipe in (self._out, self._in):
            with suppress(OSError):
                pipe.close()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        limits = self._limits
        return {
            -signal.SIGPROF: f"it takes more than {limits.seconds:g} s of processor time",
            -signal.SIGKILL: f"it takes more than {limits.seconds * WALL:g} s",
            -signal.SIGSEGV: f"it is nested too deeply: more than {limits.stack // 1024} KiB of "
            "stack are needed",
            -signal.SIGBUS: f"it is nested too deeply: more than {limits.stack // 1024} KiB of "
            "stack are needed",
            -signal.SIGABRT: f"it takes more than {limits.mebibytes} MiB of memory",
        }.get(code, f"the process that looked at it has ended with code {code}")


def _serve(work: Work, limits: Limits, source: IO[bytes], sink: IO[bytes]) -> None:
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
            # Its default action ends the process wherever it is.
            signal.setitimer(signal.ITIMER_PROF, limits.seconds)
            thread = threading.Thread(target=run, args=(message,))
            thread.start()
            thread.join()
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(sink, answers.pop())
    os._exit(0)


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


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    setup = msgspec.msgpack.decode(receive(source), type=Setup)
    module, _, name = setup.make.partition(":")
    work: Work = getattr(importlib.import_module(module), name)(setup.argument)
    child: Child | None = None
    while True:
        try:
            message = receive(source)
        except EOFError:
            break
        child = child or Child(work, setup.limits)
        answer = child.ask(message)
        if answer is None:
            answer, child = b"b" + child.end().encode(), None
        send(sink, answer)
    if child is not None:
        child.end()


if __name__ == "__main__":
    main()
