"""How a process logs: ``[log]`` of the cluster file. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class LogTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[log]``: of nodes; --log-format and --log-level come first."""

    # "text" for people; "json": an object a line with timestamp, level, event, rank and, where a
    # request is concerned, request.
    format: LogFormat = "text"
    # The least level that is logged; at "debug" also requests that machines repeat, as probes do.
    level: LogLevel = "info"
