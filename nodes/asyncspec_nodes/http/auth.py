"""API keys."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from pathlib import Path

from asyncspec.errors import UserError
from asyncspec_nodes.http.errors import ApiError

VARIABLE = "ASYNCSPEC_API_KEY"
_COMMENT = re.compile(r"(^|\s)#.*")


class Keys:
    """The keys that open the service; without any it is open to whoever reaches it."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(map(_digest, keys))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, header: str | None) -> None:
        """``Authorization`` of a request. Raises ``ApiError``."""
        if not self._digests:
            return
        scheme, _, key = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise ApiError(
                401, "there is no API key; send Authorization: Bearer KEY", code="missing_api_key"
            )
        given = _digest(key.strip())
        # Every key is compared to the end: how long it takes says nothing.
        same = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(same):
            raise ApiError(401, "the API key is not one of this service", code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def read_keys(file: Path | None) -> Keys:
    """The keys in a file, one a line, # at its beginning or behind a space begins a comment; else
    the environment's. Raises ``UserError``."""
    if file is None:
        key = os.environ.get(VARIABLE, "").strip()
        return Keys([key] if key else [])
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read the API keys in {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the API keys in {file} are not UTF-8 text") from None
    keys = [key for line in lines if (key := _COMMENT.sub("", line).strip())]
    if not keys:
        raise UserError(f"there is no API key in {file}; write one a line")
    return Keys(keys)
