"""A checkpoint's files: a local directory, or a commit of a Hub repository, of which weights are
fetched file by file when tensors in them are read. No torch.

Which tensors a Hub repository holds is known without its weights: the headers of safetensors files
are fetched by range requests and kept in Hugging Face's assets cache. Law of this file: what it
says of a commit does not depend on which of its files are here, so that nodes with different files
agree.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from asyncspec.backend.hf.checkpoint_files import (
    INDEX,
    SINGLE,
    TOKENIZER_FILES,
    Entry,
    HubName,
    TensorInfo,
    download,
    hub_errors,
    indexed,
    list_tensors,
    locate_tensors,
    parse,
    read_entries,
    read_index,
)
from asyncspec.backend.hf.families import GENERATION_CONFIG
from asyncspec.backend.hf.fingerprint import fingerprint, hub_fingerprint
from asyncspec.core.errors import CheckpointError

_DESCRIPTION = ("config.json", GENERATION_CONFIG, INDEX)
_AT_A_TIME = 8
"""Headers requested at a time."""

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_RECORD = "weights.json"


class CheckpointFiles(Protocol):
    """Where a checkpoint's files are."""

    @property
    def directory(self) -> Path:
        """Has config.json and, where it was asked for, the tokenizer; weights once fetched."""

    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors by name, also those whose file is not there yet. Raises
        ``CheckpointError``."""

    def fetch(self, files: Iterable[Path]) -> None:
        """Have the files of some ``TensorInfo`` in place."""

    def fingerprint(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
        """Equal for two nodes with the same model. ``tensors``: every expert by itself."""


def open_files(name: str | Path, *, tokenizer: bool = True) -> CheckpointFiles:
    """The files of a local directory or a Hub id; no weights are fetched. Raises as ``parse`` and
    ``download``."""
    found = parse(name)
    if isinstance(found, Path):
        return LocalFiles(found)
    patterns = (*_DESCRIPTION, *(TOKENIZER_FILES if tokenizer else ()))
    return HubFiles(found.id, download(found, patterns, bars=False))


class LocalFiles(Struct, frozen=True):
    """A directory; all of it is there."""

    directory: Path

    def tensors(self) -> dict[str, TensorInfo]:
        """See ``CheckpointFiles``."""
        return list_tensors(self.directory)

    def fetch(self, files: Iterable[Path]) -> None:
        """See ``CheckpointFiles``."""

    def fingerprint(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
        """See ``CheckpointFiles``."""
        return fingerprint(config, tensors)


class _Shard(Struct, frozen=True):
    """A safetensors file of the repository."""

    size: int
    # SHA-256 of its bytes, as the Hub has it.
    digest: str
    tensors: dict[str, Entry]


class HubFiles:
    """One commit of a repository on the Hub. ``directory``: its snapshot in the cache."""

    def __init__(self, repository: str, directory: Path) -> None:
        self.directory = directory
        # Snapshots are named by their commits.
        self._name = HubName(repository, directory.name)
        self._known: dict[str, _Shard] | None = None

    def tensors(self) -> dict[str, TensorInfo]:
        """See ``CheckpointFiles``."""
        found: dict[str, TensorInfo] = {}
        for name, shard in self._shards().items():
            # Nothing follows the tensors in a safetensors file.
            base = shard.size - max((e.data_offsets[1] for e in shard.tensors.values()), default=0)
            found |= locate_tensors(self.directory / name, shard.size, base, shard.tensors)
        index = self.directory / INDEX
        return indexed(index, read_index(index), found) if index.is_file() else found

    def fetch(self, files: Iterable[Path]) -> None:
        """See ``CheckpointFiles``. Raises as ``download``, and ``CheckpointError`` where the Hub's
        file is not what its header said."""
        missing = sorted({file for file in files if not file.is_file()})
        if not missing:
            return
        download(self._name, [glob.escape(file.name) for file in missing])
        for file in missing:
            if not file.is_file():
                raise CheckpointError(f"{self._name} has no {file.name} in the cache; download it")
            if read_entries(file)[1] != self._shards()[file.name].tensors:
                raise CheckpointError(f"{file} is not the file its header was read of; delete it")

    def fingerprint(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
        """See ``CheckpointFiles``."""
        return hub_fingerprint(config, {n: shard.digest for n, shard in self._shards().items()})

    def _shards(self) -> dict[str, _Shard]:
        if self._known is None:
            record = self._record()
            self._known = _read(record)
            if self._known is None:
                self._known = self._describe()
                _write(record, self._known)
        return self._known

    def _record(self) -> Path:
        from huggingface_hub import constants

        folder = self._name.id.replace("/", "--")
        return Path(constants.HF_ASSETS_CACHE, "asyncspec", folder, self.directory.name, _RECORD)

    def _describe(self) -> dict[str, _Shard]:
        index = self.directory / INDEX
        names = sorted(set(read_index(index).values())) if index.is_file() else [SINGLE]
        here = {name: shard for name in names if (shard := self._cached(name)) is not None}
        absent = [name for name in names if name not in here]
        return here | self._remote(absent) if absent else here

    def _cached(self, name: str) -> _Shard | None:
        """A file that is here: the cache names contents by their digests."""
        file = self.directory / name
        digest = file.resolve().name
        if not file.is_file() or not _DIGEST.fullmatch(digest):
            return None
        return _Shard(file.stat().st_size, digest, read_entries(file)[1])

    def _remote(self, names: list[str]) -> dict[str, _Shard]:
        """Files that are not here, by their headers. Raises ``CheckpointError`` where the
        repository has none such."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        api, (repository, commit) = HfApi(), (self._name.id, self._name.revision)
        with hub_errors(self._name):
            tree = api.list_repo_tree(repository, revision=commit)
            listed = {file.path: file for file in tree if isinstance(file, RepoFile)}
            for name in names:
                if name not in listed:
                    raise _missing(repository, name, listed)

            def shard(name: str) -> _Shard:
                file = listed[name]
                header = api.parse_safetensors_file_metadata(repository, name, revision=commit)
                entries = {
                    tensor: Entry(info.dtype, tuple(info.shape), info.data_offsets)
                    for tensor, info in header.tensors.items()
                }
                return _Shard(file.size, file.lfs.sha256 if file.lfs else file.blob_id, entries)

            with ThreadPoolExecutor(_AT_A_TIME) as pool:
                return dict(zip(names, pool.map(shard, names), strict=True))


def _missing(repository: str, name: str, listed: Iterable[str]) -> CheckpointError:
    if name == SINGLE and any(re.fullmatch(r"pytorch_model.*\.bin", other) for other in listed):
        return CheckpointError(
            f"{repository} has its weights as pytorch_model*.bin; use a model with safetensors"
        )
    return CheckpointError(f"{repository} has no {name}; use a model with safetensors weights")


def _read(record: Path) -> dict[str, _Shard] | None:
    try:
        return msgspec.json.decode(record.read_bytes(), type=dict[str, _Shard])
    except (OSError, msgspec.MsgspecError):
        return None  # it is made anew


def _write(record: Path, shards: dict[str, _Shard]) -> None:
    """A cache that cannot be written to costs the requests once more, next time."""
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        part = record.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.encode(shards))
        part.replace(record)
