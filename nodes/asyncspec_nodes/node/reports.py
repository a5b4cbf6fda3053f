"""A node's progress: log lines on stderr, and JSON lines to a parent process."""

from __future__ import annotations

import contextlib
import select
import sys
from collections.abc import Callable
from typing import Any, Literal, TextIO

import msgspec
from msgspec import Struct

from asyncspec_nodes.console.log import make_logger
from asyncspec_nodes.console.log_table import LogTable


class LoadingReport(Struct, frozen=True, tag="loading", tag_field="event"):
    """The node reads its model."""

    rank: int
    text: str


class ReadyReport(Struct, frozen=True, tag="ready", tag_field="event"):
    """The node has loaded and serves; its links come up by themselves."""

    rank: int
    # Half-open range of target layers; (0, 0) on the draft node.
    layers: tuple[int, int]
    dtype: str
    # "bitwise" or "tolerance" on a stage, "" on the draft node.
    guarantee: str
    seconds: float
    # On a stage, how its weights are kept: "bfloat16", "int8", "int4 in groups of 64, head int8".
    weights: str = ""
    # Threads that share a product.
    threads: int = 1
    # What computes, such as "cpu" or "cuda:0".
    device: str = "cpu"


class FailureReport(Struct, frozen=True, tag="fault", tag_field="event"):
    """The node stops. ``kind`` "user": the text says what to change."""

    rank: int
    kind: Literal["user", "cluster"]
    text: str


class AliveReport(Struct, frozen=True, tag="alive", tag_field="event"):
    """The node's event loop runs; every ``ALIVE_SECONDS`` once it serves."""

    rank: int


class HandReport(Struct, frozen=True, tag="hand", tag_field="event"):
    """The node has requests, or has none now."""

    rank: int
    some: bool


ALIVE_SECONDS = 2.0

Report = LoadingReport | ReadyReport | FailureReport | AliveReport | HandReport
ReportSink = Callable[[Report], None]


def read_report(line: bytes) -> Report:
    """One line of a node. Raises ``msgspec.DecodeError`` for anything else."""
    report: Report = msgspec.json.decode(line, type=Report)
    return report


class Reporter:
    """Logs to stderr; reports to ``pipe``, where there is a parent."""

    def __init__(self, rank: int, pipe: TextIO | None, log: LogTable | None = None) -> None:
        self._pipe = pipe
        self.rank = rank
        # Called when the node has loaded.
        self.on_serving: Callable[[], None] = lambda: None
        # Called when the node has its first request, and when it has none left.
        self.on_hand: Callable[[bool], None] = lambda some: None
        # Progress, for error texts.
        self.step = "starting"
        self.use(log or LogTable())

    def use(self, log: LogTable) -> None:
        """Log as ``log`` says from now on."""
        self.log: Any = make_logger(log, rank=self.rank)
        self._json = log.format == "json"

    def loading(self, text: str) -> None:
        """A step of loading begins."""
        self.step = f"loading {text}"
        self.log.info("loading", what=text)
        self._report(LoadingReport(self.rank, text))

    def serving(self, report: ReadyReport) -> None:
        """Loading is over."""
        self.step = "ready"
        self.on_serving()
        names = ("layers", "dtype", "guarantee", "weights", "device", "threads", "seconds")
        self.log.info("ready", **{name: getattr(report, name) for name in names})
        self._report(report)

    def alive(self) -> None:
        """The event loop runs. Nothing waits for a parent that does not read, or is gone."""
        self._report_soon(AliveReport(self.rank))

    def in_hand(self, some: bool) -> None:
        """The node has requests, or none now: a parent starts it again however often it ends with
        one. As ``alive`` waits for nothing."""
        self.on_hand(some)
        self._report_soon(HandReport(self.rank, some))

    def failed(self, kind: Literal["user", "cluster"], text: str) -> None:
        """The node is about to stop. A user's mistake is a line of its own."""
        if kind == "user" and not self._json:
            sys.stderr.write(f"asyncspec-node: {text}\n")
        else:
            self.log.error("stopping", why=text)
        self._report(FailureReport(self.rank, kind, text))

    def _report_soon(self, report: Report) -> None:
        with contextlib.suppress(OSError):
            if self._pipe is not None and select.select([], [self._pipe], [], 0)[1]:
                self._report(report)

    def _report(self, report: Report) -> None:
        if self._pipe is not None:
            self._pipe.write(msgspec.json.encode(report).decode() + "\n")
            self._pipe.flush()
