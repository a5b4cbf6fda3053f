"""Models on the Hub: from what a user calls a model to a directory, whose weights are fetched file
by file when tensors in them are read.

Which tensors a repository holds is known without its weights: the headers of safetensors files are
fetched by range requests and kept in Hugging Face's assets cache. What this module says of a commit
does not depend on which of its files are here, so that nodes with different files agree.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from asyncspec.backend.hf.checkpoint_files import (
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
from asyncspec.backend.hf.model_config import GENERATION_CONFIG
from asyncspec.core.errors import AsyncSpecError, CheckpointError, ClusterError, first_line
from asyncspec_protocol.links import HUB

_TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
_DESCRIPTION = ("config.json", GENERATION_CONFIG, INDEX)
# Second copies of the weights, in the formats of their makers' own programs.
_IGNORED = ("consolidated*", "original/*")
_PARALLEL_REQUESTS = 8
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


class HubName(Struct, frozen=True):
    """A model on the Hub: ID or ID@REVISION (a branch, a tag or a commit)."""

    id: str
    # None: the newest commit of the main branch.
    revision: str | None = None

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


def parse(name: str | Path) -> Path | HubName:
    """A local directory, or a name on the Hub. Raises ``CheckpointError`` for what is neither."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    text = str(name)
    model, _, revision = text.partition("@")
    if text.startswith((".", "/", "~")) or model.count("/") > 1 or path.exists():
        raise CheckpointError(f"there is no directory {text}; give a checkpoint's directory")
    return HubName(model, revision or None)


def short_name(name: str) -> str:
    """What users call a model: the last part of its directory's path, or of its id."""
    path = Path(name).expanduser()
    return path.name if path.is_dir() else Path(name.partition("@")[0]).name


def locate(name: str | Path, *, pickled: bool = False) -> Path:
    """The directory of a local checkpoint, or of one fetched from the Hub as a whole, with
    ``pickled`` also weights as ``pytorch_model*.bin`` (EAGLE heads).

    Raises as ``parse`` and ``download``.
    """
    found = parse(name)
    if isinstance(found, Path):
        return found
    weights = ("*.safetensors", "pytorch_model*.bin") if pickled else ("*.safetensors",)
    return download(found, (*_TOKENIZER_FILES, *weights))


def open_files(name: str | Path, *, tokenizer: bool = True) -> CheckpointFiles:
    """The files of a local directory or a Hub id; no weights are fetched. Raises as ``parse`` and
    ``download``."""
    found = parse(name)
    if isinstance(found, Path):
        return CheckpointFiles(found)
    patterns = (*_DESCRIPTION, *_TOKENIZER_FILES) if tokenizer else _DESCRIPTION
    return HubFiles(found.id, download(found, patterns, bars=False))


def download(name: HubName, patterns: Sequence[str], *, bars: bool = True) -> Path:
    """The snapshot directory of a Hub repository with at least the files that match ``patterns``,
    fetched where the cache lacks them; a terminal shows progress ``bars``. Without a network the
    files in the cache are used. Raises as ``hub_errors``."""
    with hub_errors(name), _bars(shown=bars):
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                name.id,
                revision=name.revision,
                allow_patterns=[*patterns],
                ignore_patterns=[*_IGNORED],
            )
        )


@contextmanager
def _bars(*, shown: bool) -> Iterator[None]:
    """Inside, huggingface_hub's progress bars are ``shown`` on a terminal, and nowhere else unless
    HF_HUB_DISABLE_PROGRESS_BARS says so."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    given = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None
    if given or are_progress_bars_disabled() or (shown and sys.stderr.isatty()):
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def hub_errors(name: HubName) -> Iterator[None]:
    """Translates errors of requests for ``name``: raises ``CheckpointError`` for what its user has
    to mend, ``ClusterError`` where the Hub cannot be reached or the transfer fails."""
    import huggingface_hub

    logger = logging.getLogger(huggingface_hub.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)  # a failure is reported in one line, by us
    try:
        yield
    except AsyncSpecError:
        raise
    except Exception as error:  # a lost connection raises errors of the HTTP library
        raise _translated(name, error) from error
    finally:
        logger.setLevel(level)


def _translated(name: HubName, error: Exception) -> AsyncSpecError:
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            f"{name.id} is gated: accept its terms at {constants.ENDPOINT}/{name.id} and {_LOG_IN}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{name.id} has no revision {name.revision!r}; correct it")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return CheckpointError(
            f"{name.id} is neither a local directory nor a model the Hub shows to you; correct the "
            f"name, or {_LOG_IN} if it is private"
        )
    if isinstance(error, errors.HFValidationError):
        return CheckpointError(f"{name} is neither a local directory nor a Hub id; correct it")
    absent = errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled
    if constants.HF_HUB_OFFLINE and isinstance(error, absent):
        return CheckpointError(
            f"not all that is needed of {name} is in the cache {constants.HF_HUB_CACHE}, and "
            "HF_HUB_OFFLINE is set; unset it once, or give a local directory"
        )
    cause: BaseException = error
    while cause.__cause__ is not None:  # huggingface_hub wraps errors in advice
        cause = cause.__cause__
    return ClusterError(
        f"{name} is not a local directory, and fetching it from {constants.ENDPOINT} failed "
        f"({first_line(cause)}); check the network, or download it elsewhere and give its directory"
    )


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
        self._known: dict[str, _WeightFile] | None = None

    def tensors(self) -> dict[str, TensorInfo]:
        found: dict[str, TensorInfo] = {}
        for name, file in self._weight_files().items():
            # Nothing follows the tensors in a safetensors file.
            base = file.size - max((e.data_offsets[1] for e in file.tensors.values()), default=0)
            found |= locate_tensors(self.directory / name, file.size, base, file.tensors)
        index = self.directory / INDEX
        return select_indexed(index, found) if index.is_file() else found

    def fetch(self, files: Iterable[Path]) -> None:
        """Raises as ``download``, and ``CheckpointError`` where the Hub's file is not what its
        header said."""
        missing = sorted({file for file in files if not file.is_file()})
        if not missing:
            return
        download(self._name, [glob.escape(file.name) for file in missing])
        for file in missing:
            if not file.is_file():
                raise CheckpointError(f"{self._name} has no {file.name} in the cache; download it")
            if read_entries(file)[1] != self._weight_files()[file.name].tensors:
                raise CheckpointError(f"{file} is not the file its header was read of; delete it")

    def fingerprint(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
        """Of the configuration and the Hub's digests of all weight files, for which nothing is
        downloaded. A local directory has no such digests, and another fingerprint."""
        digest = config_digest(config)
        for name, file in sorted(self._weight_files().items()):
            digest.update(f"\n{name} {file.digest}".encode())
        return HUB + digest.hexdigest()

    def _weight_files(self) -> dict[str, _WeightFile]:
        """The files by name, from the record that earlier processes left of them, if any."""
        if self._known is None:
            from huggingface_hub import constants

            folder = Path(self._name.id.replace("/", "--"), self.directory.name)
            record = Path(constants.HF_ASSETS_CACHE, "asyncspec", folder, "weights.json")
            try:
                known = msgspec.json.decode(record.read_bytes(), type=dict[str, _WeightFile])
            except (OSError, msgspec.MsgspecError):
                known = self._describe()
                # A cache that cannot be written to costs the next process the same requests.
                with contextlib.suppress(OSError):
                    record.parent.mkdir(parents=True, exist_ok=True)
                    part = record.with_suffix(f".{os.getpid()}")
                    part.write_bytes(msgspec.json.encode(known))
                    part.replace(record)
            self._known = known
        return self._known

    def _describe(self) -> dict[str, _WeightFile]:
        index = self.directory / INDEX
        names = sorted(set(read_index(index).values())) if index.is_file() else [SINGLE]
        found: dict[str, _WeightFile] = {}
        for name in names:
            file = self.directory / name
            # The cache names contents by their digests.
            digest = file.resolve().name
            if file.is_file() and _DIGEST.fullmatch(digest):
                found[name] = _WeightFile(file.stat().st_size, digest, read_entries(file)[1])
        absent = [name for name in names if name not in found]
        return found | self._request(absent) if absent else found

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
