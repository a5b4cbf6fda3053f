"""Errors in the API's own form. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class ApiError(Exception):
    """An answer that is an error: {"error": {"message", "type", "param", "code"}}."""

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
        # A path that a client has sent may be quoted, and what is in it need not be characters.
        self.message = message.encode(errors="replace").decode()
        self.param = param
        self.code = code
        # Seconds.
        self.retry_after = retry_after
        # Methods that the route does take.
        self.allow = sorted(allow)

    @property
    def kind(self) -> str:
        """The API's ``type``."""
        return _KINDS.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )

    @property
    def headers(self) -> Mapping[str, str]:
        """HTTP headers that go with it."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.allow:
            headers["Allow"] = ", ".join(self.allow)
        return headers

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON object."""
        inner = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": inner}


_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request itself must change."""
    return ApiError(400, message, param=param, code=code)


# --- Server-sent events: the frames of a stream. Pure.

DONE = b"data: [DONE]\n\n"
# A comment: it says that the service is alive, and finds out whether the reader is.
ALIVE = b": alive\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies that would collect the stream first are asked not to.
    "X-Accel-Buffering": "no",
}


def frame(value: object) -> bytes:
    """One event. JSON has no line breaks of its own, so one ``data`` line is enough."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
