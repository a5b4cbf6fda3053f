"""What a node tells whoever started it: log lines for people, JSON lines for a parent process."""

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
    # That share its products.
    threads: int = 1


class FailureReport(Struct, frozen=True, tag="fault", tag_field="event"):
    """The node stops. ``kind`` "user": the text says what to change."""

    rank: int
    kind: Literal["user", "cluster"]
    text: str


_READY = ("layers", "dtype", "guarantee", "weights", "threads", "seconds")
Report = LoadingReport | ReadyReport | FailureReport

_DECODER: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def read_report(line: bytes) -> Report:
    """A parent's view of one line. Raises ``msgspec.DecodeError`` for anything else."""
    return _DECODER.decode(line)


def _one_line(logger: Any, method: str, fields: MutableMapping[str, Any]) -> Any:
    """Names and texts in a log line may be a peer's: each stays on its line, and is text."""
    return {k: printable(v) if isinstance(v, str) else v for k, v in fields.items()}


class Reporter:
    """Log lines on stderr always; reports on ``pipe`` as well where a parent listens."""

    def __init__(self, rank: int, pipe: TextIO | None) -> None:
        self._pipe = pipe
        self.rank = rank
        # How far it has got, in words.
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
        self._tell(LoadingReport(self.rank, text))

    def serving(self, report: ReadyReport) -> None:
        """Loading is over."""
        self.step = "ready"
        fields = {n: getattr(report, n) for n in _READY}
        self.log.info("ready", **fields)
        self._tell(report)

    def failed(self, kind: Literal["user", "cluster"], text: str) -> None:
        """The node is about to stop. A user's mistake stands alone on its line."""
        if kind == "user":
            sys.stderr.write(f"asyncspec-node: {text}\n")
        else:
            self.log.error("stopping", why=text)
        self._tell(FailureReport(self.rank, kind, text))

    def _tell(self, report: Report) -> None:
        if self._pipe is not None:
            self._pipe.write(msgspec.json.encode(report).decode() + "\n")
            self._pipe.flush()
