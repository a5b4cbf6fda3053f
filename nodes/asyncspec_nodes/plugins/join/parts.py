"""A target for machines that have none: the bytes that their layers need of its files.

The copy is made of sparse files of the originals' sizes. They hold the headers, the tensors of a
stage's layers, and of all others the samples that tell two models apart, so the copy has the
original's fingerprint; a stage reads nothing else. It lives in a temporary folder.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Struct

from asyncspec.backend.base import FilePart
from asyncspec.backend.registry import backend_of
from asyncspec.core.errors import ClusterError, UserError
from asyncspec_nodes.console.output import FULL

_PIECE = 1 << 20
_READ_SECONDS = 60.0
_ATTEMPTS = 5
"""Without a byte, before a copy fails."""

_PAUSE_SECONDS = 1.0
_SAY_SECONDS = 10.0
_GAP = 1 << 16
"""Bytes between two parts that are sent rather than asked about apart."""


class Part(Struct, frozen=True):
    """Bytes [offset, offset + length) of a file of ``size``."""

    file: str
    size: int
    offset: int
    length: int


def list_parts(target: str, layers: tuple[int, int]) -> list[Part]:
    """What a stage with these layers reads. Raises ``AsyncSpecError``."""
    return merged(backend_of(target).stage_files(target, layers))


def merged(file_parts: Iterable[FilePart]) -> list[Part]:
    """In order, those close together as one."""
    parts: list[Part] = []
    for part in sorted(file_parts, key=lambda part: (part.file, part.offset)):
        size = part.file.stat().st_size
        last = parts[-1] if parts else None
        if last is not None and last.file == part.file.name:
            end = last.offset + last.length
            if part.offset <= end + _GAP:
                length = max(end, part.offset + part.length) - last.offset
                parts[-1] = Part(last.file, size, last.offset, min(length, size - last.offset))
                continue
        parts.append(Part(part.file.name, size, part.offset, min(part.length, size - part.offset)))
    return parts


def routes(target: str, allowed: Callable[[web.Request], bool]) -> list[web.RouteDef]:
    """Routes of the target's machine. ``allowed``: whether a request shows the secret."""
    path = Path(target)
    single = "" if path.is_dir() else path.name
    folder = path.parent if single else path
    # Files that are part of the target: others of the folder are private.
    served: set[str] = set()

    async def parts(request: web.Request) -> web.Response:
        if not allowed(request):
            return web.Response(status=401)
        try:
            layers = (int(request.query["first"]), int(request.query["end"]))
            listed = await asyncio.to_thread(list_parts, target, layers)
            served.update(part.file for part in listed)
        except (KeyError, ValueError):
            return web.Response(status=400)
        except UserError as error:
            return web.Response(status=404, text=str(error))
        answer = {"single": single, "parts": listed}
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def file(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if not allowed(request):
            return web.Response(status=401)
        return web.FileResponse(folder / name) if name in served else web.Response(status=404)

    return [web.get("/parts", parts), web.get("/files/{name}", file)]


class _Answer(Struct):
    # The file that names the target, where it is no directory.
    single: str
    parts: list[Part]


class PartsSource:
    """The machine that has the target, as another one sees it."""

    def __init__(
        self, session: aiohttp.ClientSession, base: str, fingerprint: aiohttp.Fingerprint
    ) -> None:
        self._session = session
        self._base = base
        self._fingerprint = fingerprint

    async def fetch(
        self, layers: tuple[int, int], folder: Path, say: Callable[[str], None]
    ) -> Path:
        """The target's copy with at least these layers; ``say`` receives how far it is. Raises
        ``UserError`` and ``ClusterError``."""
        try:
            answer = await self._ask(layers)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ClusterError(f"the target cannot be fetched: {error}") from None
        progress = _Progress(sum(part.length for part in answer.parts), say)
        for part in answer.parts:
            file = folder / Path(part.file).name
            try:
                await self._fetch(part, file, progress)
            except OSError as error:
                raise UserError(
                    f"the target cannot be kept in {folder} ({error.strerror}): make room there"
                ) from None
        return folder / answer.single if answer.single else folder

    async def _ask(self, layers: tuple[int, int]) -> _Answer:
        where = {"first": str(layers[0]), "end": str(layers[1])}
        async with self._session.get(
            f"{self._base}/parts", params=where, ssl=self._fingerprint
        ) as response:
            body = await response.read()
            if response.status != 200:
                raise UserError(
                    f"this machine has no target, and cannot fetch it ({body.decode()[:500]}); "
                    "give --target DIR"
                )
            return msgspec.json.decode(body, type=_Answer)

    async def _fetch(self, part: Part, file: Path, progress: _Progress) -> None:
        """Resumed where the connection broke."""
        done, failures = 0, 0
        with _opened(file) as stream:
            stream.truncate(part.size)
            stream.seek(part.offset)
            while done < part.length:
                start = done
                try:
                    async for piece in self._read(part, done):
                        stream.write(piece)
                        stream.flush()  # while it can be told from a broken connection
                        done += len(piece)
                        progress.add(len(piece))
                    if done == start:
                        raise ClusterError(f"{part.file} has become shorter")
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    if getattr(error, "errno", None) in FULL:
                        raise
                    failures = 1 if done > start else failures + 1
                    if failures > _ATTEMPTS:
                        raise ClusterError(f"the target cannot be fetched: {error}") from None
                    await asyncio.sleep(_PAUSE_SECONDS)

    async def _read(self, part: Part, done: int) -> AsyncIterator[bytes]:
        """What is left of a part."""
        first, last = part.offset + done, part.offset + part.length - 1
        async with self._session.get(
            f"{self._base}/files/{part.file}",
            headers={"Range": f"bytes={first}-{last}"},
            ssl=self._fingerprint,
            timeout=aiohttp.ClientTimeout(total=None, sock_read=_READ_SECONDS),
        ) as response:
            if response.status != 206:
                raise ClusterError(f"{part.file} cannot be fetched ({response.status})")
            async for piece in response.content.iter_chunked(_PIECE):
                yield piece


class _Progress:
    """Says how far a copy is, now and then."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self._total = total
        self._done = 0
        self._say = say
        self._said_at = time.monotonic()
        say(f"fetches {total / 2**20:.0f} MiB of the target: the layers of its stage")

    def add(self, count: int) -> None:
        """So many bytes more are here."""
        self._done += count
        now = time.monotonic()
        if now - self._said_at > _SAY_SECONDS:
            self._said_at = now
            self._say(f"has {self._done / 2**20:.0f} of {self._total / 2**20:.0f} MiB")


def _opened(file: Path) -> BinaryIO:
    """Made where it is missing, and kept where it is not."""
    return os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
