"""A GGUF file opened: its metadata, and where the bytes of each tensor are. Nothing of a tensor is
read, and no library is needed. A model split in several files is one model here.

The format is llama.cpp's ``ggml/include/gguf.h``.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from asyncspec.core.errors import CheckpointError

MAGIC = b"GGUF"
ARRAY, STRING = 9, 8

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""``struct`` formats of the types of metadata."""

_FLOATS = (6, 12)
_MOST = 1 << 31
"""Above every count of a model."""

BLOCKS = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18),
    "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136),
    "I32": (26, 1, 4),
    "IQ1_M": (29, 256, 56),
    "BF16": (30, 1, 2),
    "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17),
}
"""Types of tensors: their numbers in files, the weights of a block, and the bytes of a block."""

_BY_NUMBER = {number: (name, weights, size) for name, (number, weights, size) in BLOCKS.items()}
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class Tensor(Struct, frozen=True):
    """Where a tensor is."""

    # As in the file: the first dimension is contiguous.
    shape: tuple[int, ...]
    # A key of ``BLOCKS``.
    type: str
    size: int
    # None: its bytes do not matter and are nowhere.
    file: Path | None = None
    offset: int = 0


def tensor_bytes(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a tensor."""
    _, weights, size = BLOCKS[kind]
    return math.prod(shape) // weights * size


class Value(Struct, frozen=True):
    """A value of the metadata as the file has it: the bytes from its type on."""

    raw: bytes

    def get(self) -> Any:
        """A number, a text, or a list of them."""
        return _decoded(memoryview(self.raw), 0)[0]


class GGUF(Struct, frozen=True):
    """A model's metadata and tensors. ``files``: the shards in their order."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, Tensor]

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata. ``{arch}`` in a key is the model's architecture."""
        content = self.metadata.get(key.replace("{arch}", self.architecture))
        return default if content is None else content.get()

    def need(self, key: str) -> Any:
        """As ``get``. Raises ``CheckpointError`` where the file does not say."""
        if (content := self.get(key)) is None:
            key = key.replace("{arch}", self.architecture)
            raise CheckpointError(f"{self.files[0]} has no {key}; it is no language model")
        return content

    def number(self, key: str, default: int | None = None) -> int:
        """As ``get`` or, without a default, ``need``: a count. Raises ``CheckpointError``."""
        number = self.need(key) if default is None else self.get(key, default)
        if type(number) is not int or not 0 <= number < _MOST:
            key = key.replace("{arch}", self.architecture)
            raise CheckpointError(f"{self.files[0]}: {key} cannot be {number!r}; fetch it again")
        return number

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the family."""
        name = self.metadata.get("general.architecture")
        return "" if name is None else str(name.get())


def open_gguf(path: Path) -> GGUF:
    """Read the headers of a file, and of all shards where it is the first of several. Raises
    ``CheckpointError``."""
    first = _read(path)
    count = first.number("split.count", 1)
    if count < 2:
        return first
    split = _SPLIT.fullmatch(path.name)
    if split is None or (int(split[2]), int(split[3])) != (1, count):
        raise CheckpointError(
            f"{path} is part of a model in {count} files; name the first, NAME-00001-of-{count:05}"
            ".gguf, as it was made"
        )
    others = [path.with_name(f"{split[1]}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1)]
    tensors = dict(first.tensors)
    for shard in others:
        tensors |= _read(shard).tensors
    return GGUF((path, *others), first.metadata, tensors)


def _read(path: Path) -> GGUF:
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            start = stream.read(24)
            if start[:4] != MAGIC:
                raise CheckpointError(f"{path} is no GGUF file")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                view = memoryview(data)
                try:
                    model, end = _header(path, view)
                finally:
                    view.release()
    except OSError as error:
        why = error.strerror or error
        raise CheckpointError(f"{path} cannot be read ({why}); check the path") from None
    except (struct.error, IndexError, OverflowError, UnicodeDecodeError, RecursionError):
        raise CheckpointError(f"{path} is truncated or damaged; fetch it again") from None
    if end > size:
        raise CheckpointError(f"{path} is truncated: {size} of {end} bytes; fetch it again")
    return model


def _header(path: Path, data: memoryview) -> tuple[GGUF, int]:
    """The model, and the bytes the file should have."""
    version, tensor_count, value_count = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise CheckpointError(f"{path} is of GGUF version {version}; versions 2 and 3 can be read")
    at = 24
    metadata: dict[str, Value] = {}
    for _ in range(value_count):
        key, at = _text(data, at)
        end = _skip(data, at)
        content = metadata[key] = Value(bytes(data[at:end]))
        if content.raw[0] in _FLOATS and not math.isfinite(content.get()):
            raise CheckpointError(f"{path}: {key} cannot be {content.get()}; fetch it again")
        at = end
    descriptions: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(tensor_count):
        name, at = _text(data, at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        shape = struct.unpack_from(f"<{dimensions}Q", data, at + 4)
        number, offset = struct.unpack_from("<IQ", data, at + 4 + 8 * dimensions)
        at += 16 + 8 * dimensions
        descriptions.append((name, shape, number, offset))
    step = GGUF((path,), metadata, {}).number("general.alignment", 32)
    base = at + -at % max(1, step)
    tensors: dict[str, Tensor] = {}
    for name, shape, number, offset in descriptions:
        if number not in _BY_NUMBER:
            raise CheckpointError(
                f"{path}: {name} is of the unknown type {number}; use another file"
            )
        kind = _BY_NUMBER[number][0]
        size = tensor_bytes(shape, kind)
        tensors[name] = Tensor(shape, kind, size, path, base + offset)
    end = max((tensor.offset + tensor.size for tensor in tensors.values()), default=at)
    return GGUF((path,), metadata, tensors), end


def _text(data: memoryview, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + size
    if end > len(data):
        raise IndexError
    return str(data[at + 8 : end], "utf-8", "replace"), end


def _skip(data: memoryview, at: int) -> int:
    """The end of a value whose type is at ``at``."""
    (kind,) = struct.unpack_from("<I", data, at)
    at += 4
    if kind == STRING:
        at += 8 + struct.unpack_from("<Q", data, at)[0]
    elif kind == ARRAY:
        inner, count = struct.unpack_from("<IQ", data, at)
        at += 12
        if inner == STRING:
            length = struct.Struct("<Q").unpack_from
            for _ in range(count):
                at += 8 + length(data, at)[0]
        else:
            at += count * _width(inner)
    else:
        at += _width(kind)
    if at > len(data):
        raise IndexError
    return at


def _width(kind: int) -> int:
    if kind not in SCALARS:
        raise IndexError
    return struct.calcsize("<" + SCALARS[kind])


def _decoded(data: memoryview, at: int) -> tuple[Any, int]:
    (kind,) = struct.unpack_from("<I", data, at)
    at += 4
    if kind == STRING:
        return _text(data, at)
    if kind != ARRAY:
        return struct.unpack_from("<" + SCALARS[kind], data, at)[0], at + _width(kind)
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner != STRING:
        values = struct.unpack_from(f"<{count}{SCALARS[inner]}", data, at)
        return list(values), at + count * _width(inner)
    texts = list(_texts(data, at, count))
    return texts, len(data)


def _texts(data: memoryview, at: int, count: int) -> Iterator[str]:
    for _ in range(count):
        text, at = _text(data, at)
        yield text


# --- Written anew.


def value(kind: int, content: Any) -> Value:
    """A value of the metadata: a text, a number of a type of ``SCALARS``, or a list of them."""
    if isinstance(content, list):
        packed = struct.pack(f"<{len(content)}{SCALARS[kind]}", *content)
        return Value(struct.pack("<IIQ", ARRAY, kind, len(content)) + packed)
    if kind == STRING:
        return Value(struct.pack("<I", STRING) + _packed(content))
    return Value(struct.pack("<I" + SCALARS[kind], kind, content))


def header(metadata: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> bytes:
    """The beginning of a file with these tensors in this order, each aligned to 32 bytes, up to
    where the first one is."""
    parts = [struct.pack("<4sIQQ", MAGIC, 3, len(tensors), len(metadata))]
    parts += [_packed(key) + content.raw for key, content in metadata.items()]
    offset = 0
    for name, tensor in tensors.items():
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        number = BLOCKS[tensor.type][0]
        parts.append(_packed(name) + shape + struct.pack("<IQ", number, offset))
        offset += tensor.size + -tensor.size % 32
    beginning = b"".join(parts)
    return beginning + bytes(-len(beginning) % 32)


def _packed(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
