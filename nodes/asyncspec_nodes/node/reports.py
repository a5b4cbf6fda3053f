"""A node's progress: log lines on stderr, and JSON lines to a parent process."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import msgspec
import structlog
from msgspec import Struct

from asyncspec_protocol.errors import printable


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


class FailureReport(Struct, frozen=True, tag="fault", tag_field="event"):
    """The node stops. ``kind`` "user": the text says what to change."""

    rank: int
    kind: Literal["user", "cluster"]
    text: str


Report = LoadingReport | ReadyReport | FailureReport


def read_report(line: bytes) -> Report:
    """One line of a node. Raises ``msgspec.DecodeError`` for anything else."""
    report: Report = msgspec.json.decode(line, type=Report)
    return report


def _one_line(logger: Any, method: str, fields: MutableMapping[str, Any]) -> Any:
    """Escapes control characters: names and texts may be a peer's."""
    return {k: printable(v) if isinstance(v, str) else v for k, v in fields.items()}


class Reporter:
    """Logs to stderr; reports to ``pipe``, where there is a parent."""

    def __init__(self, rank: int, pipe: TextIO | None) -> None:
        self._pipe = pipe
        self.rank = rank
        # Progress, for error texts.
        self.step = "starting"
        self.log: Any = structlog.wrap_logger(
            structlog.PrintLogger(sys.stderr),
            processors=[
                _one_line,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso"),
                structlog.dev.ConsoleRenderer(
                    colors=sys.stderr.isatty(),
                    sort_keys=False,
                    exception_formatter=structlog.dev.plain_traceback,
                ),
            ],
            rank=rank,
        )

    def loading(self, text: str) -> None:
        """A step of loading begins."""
        self.step = f"loading {text}"
        self.log.info("loading", what=text)
        self._report(LoadingReport(self.rank, text))

    def serving(self, report: ReadyReport) -> None:
        """Loading is over."""
        self.step = "ready"
        names = ("layers", "dtype", "guarantee", "weights", "threads", "seconds")
        self.log.info("ready", **{name: getattr(report, name) for name in names})
        self._report(report)

    def failed(self, kind: Literal["user", "cluster"], text: str) -> None:
        """The node is about to stop. A user's mistake is a line of its own."""
        if kind == "user":
            sys.stderr.write(f"asyncspec-node: {text}\n")
        else:
            self.log.error("stopping", why=text)
        self._report(FailureReport(self.rank, kind, text))

    def _report(self, report: Report) -> None:
        if self._pipe is not None:
            self._pipe.write(msgspec.json.encode(report).decode() + "\n")
            self._pipe.flush()
