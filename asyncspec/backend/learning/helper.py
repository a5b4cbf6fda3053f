"""The node's side of its learner process. Nothing here waits for that process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from asyncspec.backend.learning.messages import (
    Example,
    InHand,
    Message,
    Round,
    Setup,
    decode_round,
    encode,
)
from asyncspec.backend.threads import COUNT_VARIABLES, DEFAULTS
from asyncspec.constraint.worker import receive, send

RESTARTS = 3
"""Times that the process is started again after it has died."""

WAITING_BYTES = 64 << 20
"""Examples that wait for the process, which reads at once unless it starts."""


class LearnerProcess:
    """Thread-safe.

    Arguments:
        setup: called for the first message at every start.
        report: takes what rounds have brought, on a thread of this object.
        off: called with the exit code when the process has died too often: nothing is learned any
            more.
    """

    def __init__(
        self,
        setup: Callable[[], Setup],
        report: Callable[[Round], None],
        off: Callable[[int], None],
    ) -> None:
        self._setup = setup
        self._report = report
        self._off = off
        self._changed = threading.Condition()
        # What the process is still to be told; the first is older.
        self._examples: deque[Example] = deque()
        self._in_hand = InHand(False)
        self._sent = InHand(False)
        self._closed = self._ended = False
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._run, name="learner", daemon=True).start()

    def add(self, example: Example) -> None:
        """Learn from an example."""
        with self._changed:
            self._examples.append(example)
            while sum(len(waiting.features) for waiting in self._examples) > WAITING_BYTES:
                self._examples.popleft()
            self._changed.notify()

    def in_hand(self, some: bool) -> None:
        """The node has requests, or has none now."""
        with self._changed:
            self._in_hand = InHand(some)
            self._changed.notify()

    def close(self) -> None:
        """End the process."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            if self._process is not None:
                self._process.kill()

    def _run(self) -> None:
        code = 0
        for _ in range(1 + RESTARTS):
            with self._changed:
                if self._closed:
                    return
                process = self._process = _started()
                self._sent, self._ended = InHand(False), False
            reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
            reader.start()
            with suppress(OSError):
                send(_pipe(process.stdin), encode(self._setup()))
                while (message := self._next()) is not None:
                    send(_pipe(process.stdin), encode(message))
            process.kill()
            code = process.wait()
            reader.join()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    _pipe(pipe).close()
        if not self._closed:
            self._off(code)

    def _next(self) -> Message | None:
        """What the process is to be told next; None at its end."""
        with self._changed:
            while not self._closed and not self._ended:
                if self._sent != self._in_hand:
                    self._sent = self._in_hand
                    return self._sent
                if self._examples:
                    return self._examples.popleft()
                self._changed.wait()
            return None

    def _read(self, pipe: IO[bytes]) -> None:
        with suppress(OSError, EOFError, ValueError):
            while True:
                self._report(decode_round(receive(pipe)))
        with self._changed:
            self._ended = True
            self._changed.notify()


def _started() -> subprocess.Popen[bytes]:
    threads = {**DEFAULTS, **dict.fromkeys((*COUNT_VARIABLES, "OPENBLAS_NUM_THREADS"), "1")}
    return subprocess.Popen(
        # -P: a file in the user's directory must not stand in for a module.
        [sys.executable, "-P", "-m", "asyncspec.backend.learning.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **threads},
        # Ctrl-C in the terminal signals only the parent; at its end stdin ends.
        start_new_session=True,
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
