"""Logs of long-running commands: one event a line on stderr, for people or as JSON."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO, cast, get_args

import msgspec
import structlog

from asyncspec_nodes.console.log_table import LogFormat, LogLevel, LogTable
from asyncspec_nodes.console.output import LogStream
from asyncspec_protocol.errors import printable


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """``--log-format`` and ``--log-level``."""
    add = parser.add_argument
    add("--log-format", choices=get_args(LogFormat), help="default: text")
    add("--log-level", choices=get_args(LogLevel), help="default: info")


def read_arguments(arguments: argparse.Namespace, table: LogTable) -> LogTable:
    """``table`` with what the options say."""
    return LogTable(
        arguments.log_format or table.format,
        arguments.log_level or table.level,
    )


_TIMES = structlog.processors.TimeStamper(fmt="iso")


def make_logger(table: LogTable, **bound: Any) -> Any:
    """A structlog logger on stderr whose lines all have the fields ``bound``."""
    processors: list[Any] = [
        _one_line,
        structlog.processors.add_log_level,
        _TIMES,
    ]
    if table.format == "json":
        processors.append(structlog.processors.format_exc_info)
        processors.append(structlog.processors.JSONRenderer(serializer=_json))
        if isinstance(sys.stderr, LogStream):
            sys.stderr.lost_line = _lost_line
    else:
        console = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            sort_keys=False,
            exception_formatter=structlog.dev.plain_traceback,
        )
        processors.append(console)
    return structlog.wrap_logger(
        structlog.PrintLogger(cast(TextIO, _Stderr())),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[table.level.upper()]
        ),
        cache_logger_on_first_use=False,
        **bound,
    )


class _Stderr:
    """What is stderr when a line is written: a display that shows progress there puts its own
    stream in place, above which lines scroll."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def _one_line(logger: Any, method: str, fields: MutableMapping[str, Any]) -> Any:
    """Escapes control characters: names and texts may be a peer's."""
    return {k: printable(v) if isinstance(v, str) else v for k, v in fields.items()}


def _json(fields: Any, **options: Any) -> str:
    return msgspec.json.encode(fields, enc_hook=str).decode()


def _lost_line(count: int, why: str) -> str:
    fields = {"lines": count, "why": why, "event": "lines of this log were lost"}
    return _json(_TIMES(None, "warning", {**fields, "level": "warning"}))
