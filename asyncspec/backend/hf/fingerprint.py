"""Which model this is, in a few bytes: nodes that are linked must hold the same one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncspec.backend.hf.checkpoint_files import TensorInfo
from asyncspec.core.errors import CheckpointError
from asyncspec_protocol.links import HUB

SAMPLE = 1024
"""Bytes that are read at the beginning, in the middle and at the end of each tensor. To read all of
a large model would take minutes; a model that was trained further, or is another revision of
this one, differs nearly everywhere."""

# Keys of config.json that may differ between two copies of the same model.
_VOLATILE = frozenset({"transformers_version", "_name_or_path", "use_cache"})


def fingerprint(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """Of a configuration, the tensors' names, types and shapes, and samples of their bytes; which
    file a tensor is in does not matter.

    Raises ``CheckpointError`` where a file cannot be read."""
    digest = _of_config(config)
    samples: dict[str, bytes] = {}
    for file in {info.file for info in tensors.values()}:
        samples |= _samples(file, {n: info for n, info in tensors.items() if info.file == file})
    for name, info in sorted(tensors.items()):
        digest.update(f"\n{name} {info.dtype} {info.shape} ".encode())
        digest.update(samples[name])
    return digest.hexdigest()


def hub_fingerprint(config: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """Of a configuration and the digests of all weight files by name, which the Hub tells without
    a download. A local directory, which has no such digests, never equals it."""
    digest = _of_config(config)
    for name, content in sorted(files.items()):
        digest.update(f"\n{name} {content}".encode())
    return HUB + digest.hexdigest()


def _of_config(config: Mapping[str, Any]) -> hashlib._Hash:
    essentials = {key: config[key] for key in sorted(config) if key not in _VOLATILE}
    return hashlib.sha256(msgspec.json.encode(essentials, order="sorted"))


def _samples(file: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, bytes]:
    """Some bytes of each of a file's tensors."""
    try:
        with file.open("rb", buffering=0) as stream:
            return {name: _sample(stream.fileno(), info) for name, info in tensors.items()}
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error


def _sample(file: int, info: TensorInfo) -> bytes:
    last = max(0, info.size - SAMPLE)
    length = min(info.size, SAMPLE)
    return b"".join(os.pread(file, length, info.offset + at) for at in (0, last // 2, last))
