"""API keys: who asks, and how much at a time and a minute.

Only hashes of keys are held, and compared in constant time. Names of keys go into logs and metrics.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from asyncspec.core.errors import UserError, reading
from asyncspec_nodes.http.api.errors import ApiError, invalid

API_KEY_VARIABLE = "ASYNCSPEC_API_KEY"
HASHED = "sha256:"
"""Before the hash of a key, in hexadecimal, that stands in the file in its place."""

ROUNDING = 1e-6
"""Rounding of summed times: who waits for as long as ``Retry-After`` says is not too early."""

MOST_BROKEN = 3
BROKEN_SECONDS = 600.0
"""So many requests of a key that were not tried again, as nodes ended with them, and the key is
refused for so many seconds: each has cost everybody two new starts of a node."""

_HASH = re.compile(HASHED + "[0-9a-f]{64}")
_COMMENT = re.compile(r"(^|\s)#.*")
_NAME = re.compile(r"[\w.@-]{1,64}")


class KeySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What stands behind a key in the file, as NAME=VALUE. 0: no bound."""

    name: str = ""
    # Answers at a time.
    concurrent: int = 0
    # Answers, and tokens of prompts and answers, a minute.
    requests: int = 0
    tokens: int = 0


class _Bucket:
    """So much a minute, and at once at most what a minute brings. What was taken without leave is
    a debt."""

    def __init__(self, minute: int, clock: Callable[[], float]) -> None:
        self._minute = minute
        self._clock = clock
        self._level = float(minute)
        self._at = clock()

    def seconds_until(self, amount: int) -> float:
        """Until so much is there; 0: now."""
        if not self._minute:
            return 0.0
        now = self._clock()
        self._level = min(self._minute, self._level + (now - self._at) * self._minute / 60)
        self._at = now
        # More than a minute brings is given to a key that has taken nothing.
        missing = min(amount, self._minute) - self._level
        return missing * 60 / self._minute if missing > ROUNDING else 0.0

    def take(self, amount: int) -> None:
        self._level -= amount


class Caller:
    """Who sends a request, and what is left of its limits."""

    def __init__(
        self, settings: KeySettings, tenant: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = settings.name
        # As in ``Submit.tenant``.
        self.tenant = tenant
        self._running = 0
        self._requests = _Bucket(settings.requests, clock)
        self._tokens = _Bucket(settings.tokens, clock)
        self._settings = settings
        self._clock = clock
        # When requests have ended nodes.
        self._broken: list[float] = []

    @contextlib.contextmanager
    def admit(self, count: int, tokens: int = 0) -> Iterator[None]:
        """Around ``count`` answers, which take ``tokens`` at once, and others with ``spend``.
        Raises ``ApiError`` where a limit is reached."""
        limits = self._settings
        if wait := self._blamed_seconds():
            text = (
                f"nodes have ended with {len(self._broken)} requests of this API key within "
                f"{BROKEN_SECONDS / 60:g} minutes; the nodes' logs say why; try again later"
            )
            raise ApiError(429, text, code="breaks", retry_after=math.ceil(wait))
        if limits.concurrent and count > limits.concurrent:
            text = f"{count} answers are asked for; this API key has {limits.concurrent} at a time"
            raise invalid(text, "n")
        if limits.concurrent and self._running + count > limits.concurrent:
            raise _limited(f"{limits.concurrent} answers at a time", 1.0)
        if limits.requests and (wait := self._requests.seconds_until(count)):
            raise _limited(f"{limits.requests} answers a minute", wait)
        if limits.tokens and (wait := self._tokens.seconds_until(max(1, tokens))):
            raise _limited(f"{limits.tokens} tokens a minute", wait)
        self._requests.take(count)
        self._tokens.take(tokens)
        self._running += count
        try:
            yield
        finally:
            self._running -= count

    def blame(self, requests: int) -> None:
        """So many of its requests have ended nodes again and again (422)."""
        if self.name:  # of a service without keys all are one caller
            self._broken += [self._clock()] * requests

    def _blamed_seconds(self) -> float:
        """For how long the key is refused because of what its requests have ended; 0: not."""
        now = self._clock()
        self._broken = [at for at in self._broken if now - at < BROKEN_SECONDS]
        if len(self._broken) < MOST_BROKEN:
            return 0.0
        return self._broken[-MOST_BROKEN] + BROKEN_SECONDS - now

    def spend(self, tokens: int) -> None:
        """Tokens of prompts and answers beyond those with which they were admitted, or fewer."""
        self._tokens.take(tokens)


def _limited(limit: str, wait: float) -> ApiError:
    return ApiError(
        429,
        f"this API key has {limit}; try again later",
        code="rate_limit_exceeded",
        retry_after=math.ceil(wait),
    )


ANYBODY = Caller(KeySettings(), "")
"""The caller of a service without keys."""


class ApiKeys:
    """The accepted API keys; without any the service is open.
    ``share_prefixes``: requests of different keys may share prompt prefixes."""

    def __init__(
        self,
        keys: Iterable[str] = (),
        settings: Iterable[KeySettings] = (),
        *,
        share_prefixes: bool = False,
    ) -> None:
        """``settings``: of each key, where there are any. A key that begins with ``HASHED`` is a
        hash, in hexadecimal."""
        named = list(settings)
        self._callers: list[tuple[bytes, Caller]] = []
        for number, key in enumerate(keys):
            hashed = key.startswith(HASHED)
            digest = bytes.fromhex(key[len(HASHED) :]) if hashed else _digest(key)
            # A second hash, so that the tenant's name does not reveal the key.
            tenant = hmac.digest(digest, b"asyncspec tenant", "sha256")[:16].hex()
            how = named[number] if named else KeySettings(f"key{number + 1}")
            self._callers.append((digest, Caller(how, "" if share_prefixes else tenant)))

    def __bool__(self) -> bool:
        return bool(self._callers)

    def check_disk_cache(self, disk_mib: int) -> None:
        """Raise ``UserError`` where a disk cache would hold what callers of different keys ask."""
        if disk_mib and any(caller.tenant for _, caller in self._callers):
            raise UserError(
                "the disk cache is not encrypted, and requests of API keys are kept apart: leave "
                "out [cache] disk_mib (--disk-mib), or give --share-prefixes all"
            )

    def check(self, header: str | None) -> Caller:
        """Whose key an ``Authorization`` header has. Raises ``ApiError``."""
        if not self._callers:
            return ANYBODY
        scheme, _, key = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise ApiError(
                401, "there is no API key; send Authorization: Bearer KEY", code="missing_api_key"
            )
        key_digest, owner = _digest(key.strip()), None
        for digest, caller in self._callers:  # all of them, each in constant time
            if hmac.compare_digest(key_digest, digest):
                owner = caller
        if owner is None:
            raise ApiError(401, "the API key is not one of this service", code="invalid_api_key")
        return owner


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _checked(key: str, where: str) -> str:
    """A key as ``ApiKeys`` takes it. Raises ``UserError`` for a hash that is none: as a key by
    itself it would open the service to everybody who has seen the file."""
    if not key.lower().startswith(HASHED):
        return key
    if _HASH.fullmatch(key.lower()) is None:
        raise UserError(f"{where}: behind {HASHED} stand the 64 hexadecimal digits of a key's hash")
    return key.lower()


def read_keys(
    file: Path | None, keys: Iterable[str] = (), *, share_prefixes: bool = False
) -> ApiKeys:
    """Keys from a file, one a line with its settings; ``#`` at the start or after a space begins a
    comment. Without a file, the ``keys``. Raises ``UserError``."""
    if file is None:
        keys = [_checked(key.strip(), f"--api-key ({API_KEY_VARIABLE})") for key in keys]
        return ApiKeys(keys, share_prefixes=share_prefixes)
    with reading(f"the API keys in {file}"):
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    keys = []
    settings: list[KeySettings] = []
    for number, line in enumerate(lines, start=1):
        fields = _COMMENT.sub("", line).split()
        if fields:
            where = f"line {number} of {file}"
            keys.append(_checked(fields[0], where))
            settings.append(_settings(fields[1:], f"key{len(keys)}", where))
    if not keys:
        raise UserError(f"there is no API key in {file}; write one a line")
    if len({one.name for one in settings}) < len(settings):
        raise UserError(f"two API keys in {file} have one name; give each its own")
    return ApiKeys(keys, settings, share_prefixes=share_prefixes)


def _settings(fields: list[str], name: str, where: str) -> KeySettings:
    """Raises ``UserError``."""
    pairs = {key: value for key, _, value in (field.partition("=") for field in fields)}
    try:
        settings = msgspec.convert({"name": name, **pairs}, KeySettings, strict=False)
    except msgspec.ValidationError as error:
        fields_of_keys = ", ".join(KeySettings.__struct_fields__)
        raise UserError(
            f"{where}: {error}; behind a key may stand {fields_of_keys}, each with = and a value"
        ) from None
    if not _NAME.fullmatch(settings.name):
        raise UserError(f"{where}: a key's name is 1 to 64 letters, digits and . _ @ -")
    if min(settings.concurrent, settings.requests, settings.tokens) < 0:
        raise UserError(f"{where}: a limit is a number from 0 on")
    return settings
