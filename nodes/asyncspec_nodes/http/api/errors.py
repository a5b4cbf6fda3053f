"""Errors in the API's form, and server-sent event frames. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """``param``: the parameter at fault; ``retry_after``: seconds; ``allow``: of the route."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        allow: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        # May quote a path, which need not be valid UTF-8.
        self.message = message.encode(errors="replace").decode()
        self.param = param
        self.code = code
        self.headers: dict[str, str] = {}
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        if allow:
            self.headers["Allow"] = ", ".join(sorted(allow))

    def body(self) -> dict[str, dict[str, str | None]]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(where: str, what: str) -> ApiError:
    return invalid(f"{what} is not supported by this service", where, "unsupported_value")


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Around work on a request that was made of another interface's: errors have the latter's
    ``names`` of parameters, by the former's; of several that fit, the first."""
    try:
        yield
    except ApiError as error:
        for ours, theirs in names.items():
            if re.match(rf"{re.escape(ours)}(?![\w])", error.param or ""):
                param = f"{theirs}{(error.param or '').removeprefix(ours)}"
                message = error.message.replace(ours, theirs)
                raise ApiError(error.status, message, param=param, code=error.code) from None
        raise


def unavailable(message: str, retry_after: int = 1) -> ApiError:
    return ApiError(503, message, code="unavailable", retry_after=retry_after)


DONE = b"data: [DONE]\n\n"
# A comment that keeps the connection alive and detects readers that have left.
ALIVE = b": alive\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Disables buffering in proxies.
    "X-Accel-Buffering": "no",
}


def frame(value: object) -> bytes:
    """One event. JSON has no line breaks, so one ``data`` line is enough."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def event(name: str, data: dict[str, object]) -> bytes:
    """A named event."""
    body = msgspec.json.encode({"type": name, **data})
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"
