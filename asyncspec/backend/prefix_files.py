"""Files of a stage's disk cache: what its cache holds for parts of texts.

A part is a file named after the text up to its end (``asyncspec.core.prefix_keys``); its header
says where it begins, so parts that follow one another make a text's beginning. All of a folder are
of one stage: model, layers, types and code decide on the folder's name. A file that is damaged, of
another kind or gone only costs time: it is removed, a line of the log says so, and the tokens from
there on are computed again. Files that were not used for longest go where there are too many bytes,
of a text the last part first.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from xxhash import xxh3_128

from asyncspec_protocol.limits import PREFIX_KEY_BYTES, PREFIX_UNIT

MAGIC = b"asyncspec prefix 1\n"
SUFFIX = ".kv"
STALE_SECONDS = 30 * 24 * 3600.0
"""A folder that no stage has used for so long is removed: its model is not served any more."""

_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 16
_START = len(MAGIC) + _DIGEST_BYTES
_MAX_HEADER = 1 << 20
_ALIGNED = 64


class Header(Struct, frozen=True, array_like=True):
    """What a file says of itself: which part of a text, and the lengths of its buffers."""

    folder: str
    key: bytes
    start: int
    end: int
    sizes: tuple[int, ...]


class _Entry(Struct):
    """A file."""

    start: int
    end: int
    nbytes: int
    used: float


class DamagedFile(Exception):
    """A file that is not what its name says."""


class PrefixFiles:
    """The disk cache of one stage, as a ``PrefixStore``. Its methods may be called on any thread.

    ``hits``, ``tokens``: how often something was read, and how many tokens in all.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """``folder``: of this stage alone. Raises ``OSError`` where it cannot be made."""
        self._folder, self._max = folder, max_bytes
        self._lock = threading.Lock()
        self._files: dict[bytes, _Entry] = {}
        self.nbytes = 0
        self.hits = self.tokens = 0
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.utime(folder)
        _remove_stale(folder)
        self._scan()

    def read(self, keys: Sequence[bytes]) -> tuple[int, object]:
        """See ``PrefixStore``."""
        with self._lock:
            chain = self._chain(keys)
        parts: list[tuple[int, int, tuple[memoryview, ...]]] = []
        for end in chain:
            key = _key(keys, end)
            part = self._load(key)
            if part is None:
                break
            parts.append(part)
        self._touch(keys, [end for _, end, _ in parts])
        tokens = parts[-1][1] if parts else 0
        self.hits += bool(tokens)
        self.tokens += tokens
        return tokens, tuple(parts)

    def write(self, keys: Sequence[bytes], start: int, end: int, arrays: object) -> int:
        """See ``PrefixStore``."""
        with self._lock:
            chain = self._chain(keys)
        reached = chain[-1] if chain else 0
        if end <= start or reached >= end:
            self._touch(keys, chain)
            return reached
        if start not in (0, *chain):
            return reached  # what it follows has gone meanwhile
        key = _key(keys, end)
        buffers = [_flat(one) for one in cast("Sequence[npt.NDArray[np.uint8]]", arrays)]
        header = Header(self._folder.name, key, start, end, tuple(b.nbytes for b in buffers))
        try:
            self._save(header, buffers, [_key(keys, at) for at in chain])
        except OSError as error:
            _warn("prompts are not stored in %s (%s)", self._folder, error.strerror)
            return -1
        with self._lock:
            chain = self._chain(keys)
        return chain[-1] if chain else 0

    def _chain(self, keys: Sequence[bytes]) -> list[int]:
        """The ends of the files that make the longest beginning of a text, in order."""
        starts: dict[int, int] = {0: 0}
        for number, key in enumerate(keys, start=1):
            entry, end = self._files.get(key), number * PREFIX_UNIT
            if entry is not None and entry.end == end and entry.start in starts:
                starts[end] = entry.start
        at = max(starts)
        chain: list[int] = []
        while at:
            chain.append(at)
            at = starts[at]
        return chain[::-1]

    def _touch(self, keys: Sequence[bytes], chain: Iterable[int]) -> None:
        """Files of a text have been used, now."""
        now = time.time()
        for end in chain:
            key = _key(keys, end)
            with self._lock:
                if (entry := self._files.get(key)) is None:
                    continue
                entry.used = now
            with suppress(OSError):
                os.utime(self._path(key), (now, now))

    def _load(self, key: bytes) -> tuple[int, int, tuple[memoryview, ...]] | None:
        """A file's part; None where there is none any more."""
        path = self._path(key)
        try:
            content = bytearray(path.stat().st_size)  # torch wants what can be written
            with path.open("rb") as stream:
                stream.readinto(content)
            header, at = _header(content, self._folder.name, key)
            if xxh3_128(memoryview(content)[_START:]).digest() != content[len(MAGIC) : _START]:
                raise DamagedFile("its checksum is wrong")
            if at + sum(header.sizes) != len(content):
                raise DamagedFile("its length is wrong")
        except FileNotFoundError:
            self._forget(key)
            return None
        except (OSError, DamagedFile) as error:
            self._discard(path, error)
            return None
        buffers: list[memoryview] = []
        for size in header.sizes:
            buffers.append(memoryview(content)[at : at + size])
            at += size
        return header.start, header.end, tuple(buffers)

    def _save(self, header: Header, buffers: Sequence[memoryview], above: Sequence[bytes]) -> None:
        """Write a file at once; ``above``: files that it goes on from, which must stay."""
        packed = msgspec.msgpack.encode(header)
        head = _LENGTH.pack(len(packed)) + packed
        head += bytes(_aligned(_START + len(head)) - _START - len(head))
        nbytes = _START + len(head) + sum(header.sizes)
        if not self._make_room(nbytes, {*above, header.key}):
            return
        digest = xxh3_128(head)
        path = self._path(header.key)
        part = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
        try:
            with open(part, "wb") as stream:
                stream.seek(_START)
                stream.write(head)
                for buffer in buffers:
                    digest.update(buffer)
                    stream.write(buffer)
                stream.seek(0)
                stream.write(MAGIC + digest.digest())
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        with self._lock:
            self._add(header.key, _Entry(header.start, header.end, nbytes, time.time()))

    def _make_room(self, nbytes: int, kept: set[bytes]) -> bool:
        """Remove the files that were not used for longest until there is room for so many bytes;
        whether there is."""
        with self._lock:
            order = sorted(
                (entry.used, -entry.end, key)
                for key, entry in self._files.items()
                if key not in kept
            )
            excess = self.nbytes + nbytes - self._max
            if excess > sum(self._files[key].nbytes for *_, key in order):
                return False
            for *_, key in order:
                if excess <= 0:
                    break
                excess -= self._files[key].nbytes
                self._drop(key)
                with suppress(OSError):
                    self._path(key).unlink()
        return True

    def _add(self, key: bytes, entry: _Entry) -> None:
        self._drop(key)
        self._files[key] = entry
        self.nbytes += entry.nbytes

    def _drop(self, key: bytes) -> None:
        if (entry := self._files.pop(key, None)) is not None:
            self.nbytes -= entry.nbytes

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._drop(key)

    def _discard(self, path: Path, why: Exception) -> None:
        """Remove a file that cannot be used."""
        _warn("%s holds no part of a stored prompt (%s); it is removed", path, why)
        with suppress(ValueError):
            self._forget(bytes.fromhex(path.stem))
        with suppress(OSError):
            path.unlink()

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}{SUFFIX}"

    def _scan(self) -> None:
        """Find the files from before. Only their headers are read."""
        for path in [*self._folder.iterdir()]:
            try:
                key = bytes.fromhex(path.stem) if path.suffix == SUFFIX else b""
                if len(key) != PREFIX_KEY_BYTES:
                    raise DamagedFile("its name is none of a part")
                with path.open("rb") as stream:
                    header, at = _header(_beginning(stream), self._folder.name, key)
                status = path.stat()
                if status.st_size != at + sum(header.sizes):
                    raise DamagedFile("its length is wrong")
            except (OSError, DamagedFile, ValueError) as error:
                self._discard(path, error)
                continue
            entry = _Entry(header.start, header.end, status.st_size, status.st_mtime)
            self._add(key, entry)
        self._make_room(0, set())


def _key(keys: Sequence[bytes], end: int) -> bytes:
    """The name of a text's beginning of so many tokens."""
    return keys[end // PREFIX_UNIT - 1]


def _beginning(stream: BinaryIO) -> bytes:
    """A file up to the end of its header."""
    start = stream.read(_START + _LENGTH.size)
    if len(start) < _START + _LENGTH.size:
        return start
    (length,) = _LENGTH.unpack(start[_START:])
    return start + stream.read(min(length, _MAX_HEADER))


def _header(content: bytes | bytearray, folder: str, key: bytes) -> tuple[Header, int]:
    """A file's header, and where it ends. Raises ``DamagedFile``."""
    if not content.startswith(MAGIC):
        raise DamagedFile("it is of another kind")
    if len(content) < _START + _LENGTH.size:
        raise DamagedFile("it is cut off")
    (length,) = _LENGTH.unpack_from(content, _START)
    at = _START + _LENGTH.size
    try:
        header = msgspec.msgpack.decode(content[at : at + min(length, _MAX_HEADER)], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise DamagedFile("its header cannot be read") from None
    if (header.folder, header.key) != (folder, key):
        raise DamagedFile("it was stored by another name")
    if not 0 <= header.start < header.end or min(header.sizes, default=0) < 0:
        raise DamagedFile("its header makes no sense")
    return header, _aligned(at + length)


def _aligned(length: int) -> int:
    """Where buffers begin behind a header of this length, so that numbers can be read there."""
    return -(-length // _ALIGNED) * _ALIGNED


def _flat(array: npt.NDArray[np.uint8]) -> memoryview:
    """The bytes of an array, one after the other."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _remove_stale(folder: Path) -> None:
    """Remove the folders beside ``folder`` that were not used for long."""
    for neighbour in _folders(folder.parent):
        with suppress(OSError):
            if time.time() - neighbour.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(neighbour)


def _folders(root: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from [path for path in root.iterdir() if path.is_dir()]


def _warn(text: str, *details: object) -> None:
    logging.getLogger(__name__).warning(text, *details)
