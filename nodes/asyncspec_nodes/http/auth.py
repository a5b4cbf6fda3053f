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
    """The keys that open the service; without any it is open to whoever reaches it.
    ``share_prefixes``: requests of all keys share prompt prefixes, as those without keys do."""

    def __init__(self, keys: Iterable[str] = (), *, share_prefixes: bool = False) -> None:
        self._digests = tuple(map(_digest, keys))
        self._share_prefixes = share_prefixes

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, header: str | None) -> str:
        """The tenant of a request with this ``Authorization``: see ``Submit.tenant``. Raises
        ``ApiError``."""
        if not self._digests:
            return ""
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
        return "" if self._share_prefixes else _tenant(given)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _tenant(digest: bytes) -> str:
    """Another hash of the key: it names its tenant, and does not open the service."""
    return hmac.digest(digest, b"asyncspec tenant", "sha256")[:16].hex()


def read_keys(file: Path | None, *, share_prefixes: bool = False) -> Keys:
    """The keys in a file, one a line, # at its beginning or behind a space begins a comment; else
    the environment's. Raises ``UserError``."""
    if file is None:
        key = os.environ.get(VARIABLE, "").strip()
        return Keys([key] if key else [], share_prefixes=share_prefixes)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read the API keys in {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the API keys in {file} are not UTF-8 text") from None
    keys = [key for line in lines if (key := _COMMENT.sub("", line).strip())]
    if not keys:
        raise UserError(f"there is no API key in {file}; write one a line")
    return Keys(keys, share_prefixes=share_prefixes)
