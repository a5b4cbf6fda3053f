"""Models on the Hub: from what a user calls a model to a directory, whose weights are fetched file
by file when tensors in them are read.

Which tensors a repository holds is known without its weights: the headers of safetensors files are
fetched by range requests and kept in Hugging Face's assets cache. What this module says of a commit
does not depend on which of its files are here, so that nodes with different files agree.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from asyncspec.backend.hub import HubName, download, hub_errors
from asyncspec.core.errors import CheckpointError
from asyncspec.core.paths import expanded
from asyncspec.plugins.hf.checkpoint.files.headers import (
    INDEX,
    SINGLE,
    CheckpointFiles,
    Entry,
    TensorInfo,
    config_digest,
    locate_tensors,
    read_entries,
    read_index,
    select_indexed,
)
from asyncspec.plugins.hf.checkpoint.model_config import GENERATION_CONFIG
from asyncspec_protocol.links import HUB

_TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
_DESCRIPTION = ("config.json", GENERATION_CONFIG, INDEX)
_PARALLEL_REQUESTS = 8  # of headers
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def parse(name: str | Path) -> Path | HubName:
    """A local directory, or a name on the Hub. Raises ``CheckpointError`` for what is neither."""
    path = expanded(name)
    if os.path.isdir(path):
        return path
    text = str(name)
    if os.path.isfile(path):
        raise CheckpointError(
            f"{text} is a file; give a checkpoint's directory, or a GGUF file, named .gguf"
        )
    model, _, revision = text.partition("@")
    if text.startswith((".", "/", "~")) or model.count("/") > 1:
        raise CheckpointError(f"there is no directory {text}; give a checkpoint's directory")
    return HubName(model, revision or None)


def short_name(name: str) -> str:
    """What users call a model: the last part of its directory's path, or of its id."""
    path = expanded(name)
    return path.name if os.path.isdir(path) else Path(name.partition("@")[0]).name


def locate(name: str | Path, *, pickled: bool = False) -> Path:
    """The directory of a local checkpoint, or of one fetched from the Hub as a whole, with
    ``pickled`` also ``pytorch_model*.bin`` (EAGLE heads). Raises as ``parse`` and ``download``."""
    source = parse(name)
    if isinstance(source, Path):
        return source
    weights = ("*.safetensors", "pytorch_model*.bin") if pickled else ("*.safetensors",)
    return download(source, (*_TOKENIZER_FILES, *weights))


def open_files(name: str | Path, *, tokenizer: bool = True) -> CheckpointFiles:
    """A model's files; weights are not fetched. Raises as ``parse`` and ``download``."""
    source = parse(name)
    if isinstance(source, Path):
        return CheckpointFiles(source)
    patterns = (*_DESCRIPTION, *_TOKENIZER_FILES) if tokenizer else _DESCRIPTION
    return HubFiles(source.id, download(source, patterns, bars=False))


class _WeightFile(Struct, frozen=True):
    """A safetensors file of a repository."""

    size: int
    # SHA-256 of its bytes, as the Hub has it.
    digest: str
    tensors: dict[str, Entry]


class HubFiles(CheckpointFiles):
    """One commit of a repository on the Hub. ``directory``: its snapshot in the cache."""

    def __init__(self, repository: str, directory: Path) -> None:
        super().__init__(directory)
        # Snapshots are named by their commits.
        self._name = HubName(repository, directory.name)

    def tensors(self) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, file in self._weight_files.items():
            # Nothing follows the tensors in a safetensors file.
            base = file.size - max((e.data_offsets[1] for e in file.tensors.values()), default=0)
            tensors |= locate_tensors(self.directory / name, file.size, base, file.tensors)
        index = self.directory / INDEX
        return select_indexed(index, tensors) if index.is_file() else tensors

    def fetch(self, files: Iterable[Path]) -> None:
        """Raises as ``download``, and ``CheckpointError`` for a file of another header."""
        missing = sorted({file for file in files if not file.is_file()})
        if not missing:
            return
        download(self._name, [glob.escape(file.name) for file in missing])
        for file in missing:
            if not file.is_file():
                raise CheckpointError(f"{self._name} has no {file.name} in the cache; download it")
            if read_entries(file)[1] != self._weight_files[file.name].tensors:
                raise CheckpointError(f"{file} is not the file its header was read of; delete it")

    def fingerprint(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
        """A digest of the configuration and the Hub's digests of weight files; nothing is
        downloaded. A local directory has no such digests, and another fingerprint."""
        digest = config_digest(config)
        for name, file in sorted(self._weight_files.items()):
            digest.update(f"\n{name} {file.digest}".encode())
        return HUB + digest.hexdigest()

    @cached_property
    def _weight_files(self) -> dict[str, _WeightFile]:
        """The files by name, from the record that earlier processes left of them, if any."""
        from huggingface_hub import constants

        folder = Path(self._name.id.replace("/", "--"), self.directory.name)
        record = Path(constants.HF_ASSETS_CACHE, "asyncspec", folder, "weights.json")
        try:
            return msgspec.json.decode(record.read_bytes(), type=dict[str, _WeightFile])
        except (OSError, msgspec.MsgspecError):
            files = self._describe()
        # A cache that cannot be written to costs the next process the same requests.
        with contextlib.suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            part = record.with_suffix(f".{os.getpid()}")
            part.write_bytes(msgspec.json.encode(files))
            part.replace(record)
        return files

    def _describe(self) -> dict[str, _WeightFile]:
        index = self.directory / INDEX
        names = sorted(set(read_index(index).values())) if index.is_file() else [SINGLE]
        files: dict[str, _WeightFile] = {}
        for name in names:
            file = self.directory / name
            # The cache names contents by their digests.
            digest = file.resolve().name
            if file.is_file() and _DIGEST.fullmatch(digest):
                files[name] = _WeightFile(file.stat().st_size, digest, read_entries(file)[1])
        absent = [name for name in names if name not in files]
        return files | self._request(absent) if absent else files

    def _request(self, names: list[str]) -> dict[str, _WeightFile]:
        """Files that are not here, by their headers. Raises ``CheckpointError`` where the
        repository lacks one."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        api, (repository, commit) = HfApi(), (self._name.id, self._name.revision)
        with hub_errors(self._name):
            tree = api.list_repo_tree(repository, revision=commit)
            listed = {file.path: file for file in tree if isinstance(file, RepoFile)}
            for name in names:
                if name not in listed:
                    raise _missing(repository, name, listed)

            def request(name: str) -> _WeightFile:
                file = listed[name]
                header = api.parse_safetensors_file_metadata(repository, name, revision=commit)
                entries = {
                    tensor: Entry(info.dtype, tuple(info.shape), info.data_offsets)
                    for tensor, info in header.tensors.items()
                }
                digest = file.lfs.sha256 if file.lfs else file.blob_id
                return _WeightFile(file.size, digest, entries)

            with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
                return dict(zip(names, pool.map(request, names), strict=True))


def _missing(repository: str, name: str, listed: Iterable[str]) -> CheckpointError:
    if name == SINGLE and any(re.fullmatch(r"pytorch_model.*\.bin", other) for other in listed):
        return CheckpointError(
            f"{repository} has its weights as pytorch_model*.bin; use a model with safetensors"
        )
    return CheckpointError(f"{repository} has no {name}; use a model with safetensors weights")
