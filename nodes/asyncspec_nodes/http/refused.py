"""What the log says of requests that are not HTTP: that there was one, and none of its bytes.

aiohttp's own log has a traceback for each, whose message quotes what was sent: part of a prompt, or
somebody's key.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError


class WithoutBytes(logging.LoggerAdapter[logging.Logger]):
    """A logger for aiohttp's server. Mistakes of our own keep their tracebacks."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """See ``LoggerAdapter``."""
        if _is_refusal(kwargs.get("exc_info")):
            super().log(logging.WARNING, "a request that is not HTTP was refused")
        else:
            super().log(level, msg, *args, **kwargs)


def _is_refusal(error: object) -> bool:
    """Whether an exception comes of bytes that are not HTTP, maybe by way of others."""
    while isinstance(error, BaseException):
        if isinstance(error, HttpProcessingError):
            return True
        error = error.__cause__ or error.__context__
    return False


def log() -> WithoutBytes:
    """Where the HTTP server writes."""
    return WithoutBytes(logging.getLogger("asyncspec.http"), {})
