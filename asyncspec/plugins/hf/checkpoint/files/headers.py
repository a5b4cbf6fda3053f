"""The files of a checkpoint: which tensors they hold and where, from safetensors headers alone.

A safetensors file is 8 bytes of header length, a JSON header and the tensors one after another.
"""

from __future__ import annotations

import hashlib
import math
import os
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from asyncspec.backend.base import SAMPLE_BYTES
from asyncspec.core.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_ITEM_BYTES = (
    dict.fromkeys(("F64", "I64", "U64"), 8)
    | dict.fromkeys(("F32", "I32", "U32"), 4)
    | dict.fromkeys(("F16", "BF16", "I16", "U16"), 2)
    | dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1)
)
_MAX_HEADER = 100 << 20
"""Bytes; the limit of the safetensors library."""

_VOLATILE = frozenset({"transformers_version", "_name_or_path", "use_cache"})
"""Keys of config.json that may differ between two copies of one model."""


class Entry(Struct, frozen=True):
    """A tensor as a safetensors header has it; offsets count from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class TensorInfo(Struct, frozen=True):
    """Where a tensor is: ``size`` bytes from ``offset`` of ``file``, in C order of its shape, or of
    the reversed one where a matrix is stored ``transposed``."""

    file: Path
    offset: int
    size: int
    # safetensors' name: F32, F16, BF16, ...
    dtype: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        """The tensors of the files that it is made of."""
        return (self,)


class CheckpointFiles:
    """A checkpoint's directory, with config.json and, where requested, the tokenizer."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors by name, also of files to be fetched. Raises ``CheckpointError``."""
        return list_tensors(self.directory)

    def fetch(self, files: Iterable[Path]) -> None:
        """Make the files of some ``TensorInfo`` available."""

    def fingerprint(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
        """Equal for two nodes with the same model: a digest of the configuration, the tensors'
        names, types and shapes, and samples of their bytes; which file a tensor is in does not
        matter. ``tensors``: with unstacked experts. Raises ``CheckpointError``."""
        digest = config_digest(config)
        for name, info in sorted(tensors.items()):
            digest.update(f"\n{name} {info.dtype} {info.shape} ".encode())
            last, length = max(0, info.size - SAMPLE_BYTES), min(info.size, SAMPLE_BYTES)
            try:
                with info.file.open("rb", buffering=0) as stream:
                    for start in (0, last // 2, last):
                        digest.update(os.pread(stream.fileno(), length, info.offset + start))
            except OSError as error:
                raise CheckpointError(f"{info.file} cannot be read ({error})") from error
        return digest.hexdigest()


def config_digest(config: Mapping[str, Any]) -> hashlib._Hash:
    """SHA-256 of a configuration, to be updated with what identifies the weights."""
    essentials = {key: config[key] for key in sorted(config) if key not in _VOLATILE}
    return hashlib.sha256(msgspec.json.encode(essentials, order="sorted"))


def list_tensors(directory: Path) -> dict[str, TensorInfo]:
    """All tensors by name. Raises ``CheckpointError`` for missing or broken files."""
    single, index = directory / SINGLE, directory / INDEX
    # Where a directory has both, transformers reads the single file.
    if single.is_file():
        return read_header(single)
    if index.is_file():
        tensors: dict[str, TensorInfo] = {}
        for name in sorted(set(read_index(index).values())):
            if not (directory / name).is_file():
                raise CheckpointError(
                    f"{index} names the file {name!r}, which is not there; "
                    "download the missing part of the checkpoint"
                )
            tensors |= read_header(directory / name)
        return select_indexed(index, tensors)
    if any(directory.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{directory} has its weights as pytorch_model*.bin; "
            "save them as safetensors (save_pretrained does) and try again"
        )
    raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}; give a full checkpoint")


class _Index(Struct):
    weight_map: dict[str, Annotated[str, Meta(pattern="^[^/]+$")]]


def read_index(index: Path) -> dict[str, str]:
    """The file of every tensor, by the tensor's name. Raises ``CheckpointError``."""
    try:
        return msgspec.json.decode(
            index.read_bytes().removeprefix(BOM_UTF8), type=_Index
        ).weight_map
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{index} cannot be read ({error}); download it again") from error


def select_indexed(index: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors that an index names, as far as files hold them: some conversions leave out what
    no layer reads. Raises ``CheckpointError``."""
    return {name: tensors[name] for name in read_index(index) if name in tensors}


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises ``CheckpointError``."""
    base, entries = read_entries(file)
    return locate_tensors(file, file.stat().st_size, base, entries)


def read_entries(file: Path) -> tuple[int, dict[str, Entry]]:
    """Offset of the first tensor (bytes), and the header. Raises ``CheckpointError``."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise CheckpointError(f"{file} is not a whole safetensors file; download it again")
            raw = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(r, type=Entry) for name, r in raw.items()}
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); download it again") from error
    return 8 + length, entries


def locate_tensors(
    file: Path, size: int, base: int, entries: Mapping[str, Entry]
) -> dict[str, TensorInfo]:
    """The tensors of a file, the first at byte ``base``; ``CheckpointError`` if they do not fit."""
    tensors: dict[str, TensorInfo] = {}
    for name, entry in entries.items():
        start, end = entry.data_offsets
        item = _ITEM_BYTES.get(entry.dtype)
        if item is not None and end - start != item * math.prod(entry.shape):
            raise CheckpointError(f"tensor {name!r} of {file} has a wrong size; download it again")
        if not 0 <= start <= end or base + end > size:
            raise CheckpointError(f"{file} is cut off before tensor {name!r}; download it again")
        tensors[name] = TensorInfo(file, base + start, end - start, entry.dtype, entry.shape)
    return tensors


def main_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """The floating-point type most of the bytes have: "bfloat16", "float16" or "float32"."""
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    total = dict.fromkeys(names, 0)
    for info in tensors.values():
        if info.dtype in names:
            total[info.dtype] += info.size
    return names[max(total, key=total.__getitem__)]
