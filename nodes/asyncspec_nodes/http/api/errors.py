"""Errors in the API's form, and server-sent event frames. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class ApiError(Exception):
    """An error response: {"error": {"message", "type", "param", "code"}}."""

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
        # Seconds.
        self.retry_after = retry_after
        # Methods that the route has.
        self.allow = sorted(allow)

    @property
    def kind(self) -> str:
        return _KINDS.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.allow:
            headers["Allow"] = ", ".join(self.allow)
        return headers

    def body(self) -> dict[str, dict[str, str | None]]:
        inner = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": inner}


_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


# --- Server-sent events

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
