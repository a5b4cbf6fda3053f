"""The learner's process: trains while its node has no request, at the lowest priority.

It reads messages on a thread of its own, so that the node never waits for a step, and ends with the
node: at the end of stdin.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from asyncspec.backend.learning.buffer import ExampleBuffer
from asyncspec.backend.learning.messages import (
    Example,
    InHand,
    Learner,
    Setup,
    decode_message,
    encode,
)
from asyncspec.backend.learning.rounds import Rounds
from asyncspec.backend.learning.versions import next_version
from asyncspec.constraint.worker import receive, send

REST = 1.0
"""Seconds without a request after which the node counts as idle: answers to one conversation follow
one another."""


class Inbox:
    """What the node has said, read by a thread."""

    def __init__(self, buffer: ExampleBuffer) -> None:
        self.buffer = buffer
        # Set while the node has no request.
        self._idle = threading.Event()
        self._idle.set()
        # Set when an example comes.
        self._news = threading.Event()

    def read(self) -> None:
        """To the end of stdin, and of this process."""
        with suppress(EOFError, OSError):
            while True:
                match decode_message(receive(sys.stdin.buffer)):
                    case Example() as example:
                        self.buffer.add(example, time.monotonic())
                        self._news.set()
                    case InHand(True):
                        self._idle.clear()
                    case InHand():
                        self._idle.set()
                    case _:
                        raise EOFError("the node is of another version")
        os._exit(0)

    def wait_until_idle(self) -> None:
        """Return where the node has no request; after one, a little later."""
        while not self._idle.is_set():
            self._idle.wait()
            time.sleep(REST)

    def wait_for_news(self) -> None:
        """Return when another example has come."""
        self._news.wait()
        self._news.clear()


def yield_to_all() -> None:
    """Give this process what no other wants of the processor, and let it end first where memory
    runs out."""
    with suppress(OSError, AttributeError):
        os.nice(19)
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def main() -> None:
    """Train until the node ends."""
    yield_to_all()
    setup = decode_message(receive(sys.stdin.buffer))
    assert isinstance(setup, Setup)
    buffer = ExampleBuffer(setup.memory)
    inbox = Inbox(buffer)
    threading.Thread(target=inbox.read, daemon=True).start()
    inbox.wait_until_idle()
    module, _, name = setup.make.partition(":")
    learner: Learner = getattr(importlib.import_module(module), name)(setup)
    folder = Path(setup.folder)
    rounds = Rounds(learner, buffer, lambda: next_version(folder))
    seconds = 0.0
    while True:
        buffer.expire(time.monotonic())
        if not rounds.has_work:
            inbox.wait_for_news()
            continue
        inbox.wait_until_idle()
        began = time.monotonic()
        result = rounds.advance()
        seconds += time.monotonic() - began
        if result is not None:
            send(sys.stdout.buffer, encode(replace(result, seconds=seconds)))


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the thread that reads has stdin's lock
