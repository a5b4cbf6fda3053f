"""Which tensors a checkpoint holds, and where: safetensors headers, no torch, nothing read.

A safetensors file is 8 bytes of header length, a JSON header and the tensors one after another.
Reading with ``pread`` touches exactly the bytes of the tensors a stage needs.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from asyncspec.core.errors import AsyncSpecError, CheckpointError, ClusterError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}
_LONGEST_HEADER = 100 << 20


class Entry(Struct, frozen=True):
    """A tensor as a safetensors header has it; offsets count from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(Struct):
    weight_map: dict[str, str]


class TensorInfo(Struct, frozen=True):
    """Where a tensor is: ``size`` bytes from ``offset`` of ``file``, in C order."""

    file: Path
    offset: int
    size: int
    # safetensors' name: F32, F16, BF16, ...
    dtype: str
    shape: tuple[int, ...]


def list_tensors(directory: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint by name. Raises ``CheckpointError`` where a file is missing,
    truncated or not what it should be."""
    single, index = directory / SINGLE, directory / INDEX
    # As transformers: of a directory that has both, the single file counts.
    if single.is_file():
        return read_header(single)
    if index.is_file():
        return _sharded(directory, index)
    if any(directory.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{directory} has its weights as pytorch_model*.bin; "
            "save them as safetensors (save_pretrained does) and try again"
        )
    raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}; give a full checkpoint")


def _sharded(directory: Path, index: Path) -> dict[str, TensorInfo]:
    weight_map = read_index(index)
    found: dict[str, TensorInfo] = {}
    for name in sorted(set(weight_map.values())):
        if not (directory / name).is_file():
            raise CheckpointError(
                f"{index} names the file {name!r}, which is not there; "
                "download the missing part of the checkpoint"
            )
        found |= read_header(directory / name)
    return indexed(index, weight_map, found)


def read_index(index: Path) -> dict[str, str]:
    """The file of every tensor, by name. Raises ``CheckpointError``."""
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{index} cannot be read ({error}); download it again") from error
    for name in weight_map.values():
        if Path(name).name != name:
            raise CheckpointError(
                f"{index} names the file {name!r}, which is not there; "
                "download the missing part of the checkpoint"
            )
    return weight_map


def indexed(
    index: Path, weight_map: Mapping[str, str], found: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Of the tensors that were found, those of an index. Raises ``CheckpointError`` where one is
    missing."""
    missing = sorted(weight_map.keys() - found.keys())
    if missing:
        raise CheckpointError(
            f"{index} names the tensor {missing[0]!r}, which no file holds; "
            "download the checkpoint again"
        )
    return {name: found[name] for name in weight_map}


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises ``CheckpointError``."""
    base, entries = read_entries(file)
    return locate_tensors(file, file.stat().st_size, base, entries)


def read_entries(file: Path) -> tuple[int, dict[str, Entry]]:
    """Where the tensors of a safetensors file begin, in bytes, and its header. Raises
    ``CheckpointError``."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
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
    """The tensors of a file of ``size`` bytes, which begin at its byte ``base``. Raises
    ``CheckpointError`` where they do not fit in it."""
    return {name: _located(file, size, base, name, e) for name, e in entries.items()}


def _located(file: Path, file_size: int, base: int, name: str, entry: Entry) -> TensorInfo:
    start, end = entry.data_offsets
    item = ITEM_BYTES.get(entry.dtype)
    if item is not None and end - start != item * math.prod(entry.shape):
        raise CheckpointError(f"tensor {name!r} of {file} has a wrong size; download it again")
    if not 0 <= start <= end or base + end > file_size:
        raise CheckpointError(f"{file} is cut off before tensor {name!r}; download it again")
    return TensorInfo(file, base + start, end - start, entry.dtype, entry.shape)


def read_into(info: TensorInfo, buffer: memoryview) -> None:
    """Fill ``buffer`` (``info.size`` bytes, writable) with a tensor's bytes."""
    try:
        with info.file.open("rb", buffering=0) as stream:
            done = 0
            while done < info.size:
                got = os.preadv(stream.fileno(), [buffer[done:]], info.offset + done)
                if got == 0:
                    raise CheckpointError(f"{info.file} is shorter than its header says")
                done += got
    except OSError as error:
        raise CheckpointError(f"{info.file} cannot be read ({error})") from error


def main_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """The floating-point type most of the bytes have: "bfloat16", "float16" or "float32"."""
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    total = dict.fromkeys(names.values(), 0)
    for info in tensors.values():
        if info.dtype in names:
            total[names[info.dtype]] += info.size
    return max(total, key=lambda name: total[name])


# --- From what a user calls a model to a directory: local paths and Hub ids. No torch.

TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
_HUB_FILES = (*TOKENIZER_FILES, "*.safetensors")
# Weights once more, for the programs of those who made the model.
_SECOND_COPIES = ("consolidated*", "original/*")
_PICKLED_FILES = ("pytorch_model*.bin",)
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
    """The directory of a local checkpoint, or of one fetched from the Hub as a whole.

    ``pickled``: weights as ``pytorch_model*.bin`` are wanted as well (EAGLE heads).

    Raises as ``parse`` and ``download``.
    """
    found = parse(name)
    if isinstance(found, Path):
        return found
    return download(found, (*_HUB_FILES, *(_PICKLED_FILES if pickled else ())))


def download(name: HubName, patterns: Sequence[str], *, bars: bool = True) -> Path:
    """The snapshot directory of a Hub repository with at least the files that match ``patterns``,
    fetched where the cache lacks them; a terminal shows progress ``bars``. Without a network, what
    is in the cache has to do.

    Raises as ``hub_errors``.
    """
    with hub_errors(name), _bars(shown=bars):
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                name.id,
                revision=name.revision,
                allow_patterns=[*patterns],
                ignore_patterns=[*_SECOND_COPIES],
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

    said = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled()
    if said or (shown and sys.stderr.isatty()):
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def hub_errors(name: HubName) -> Iterator[None]:
    """Inside, the Hub is asked for ``name``. Raises ``CheckpointError`` for what its user has to
    mend, ``ClusterError`` where the Hub cannot be reached or the transfer fails."""
    import huggingface_hub

    logger = logging.getLogger(huggingface_hub.__name__)
    before = logger.level
    logger.setLevel(logging.ERROR)  # a failure is one line, and it is ours
    try:
        yield
    except AsyncSpecError:
        raise
    except Exception as error:  # a lost connection raises what its HTTP library does
        raise _explained(name, error) from error
    finally:
        logger.setLevel(before)


def _explained(name: HubName, error: Exception) -> AsyncSpecError:
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    offline = constants.HF_HUB_OFFLINE and isinstance(
        error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled
    )
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
    if offline:
        return CheckpointError(
            f"not all that is needed of {name} is in the cache {constants.HF_HUB_CACHE}, and "
            "HF_HUB_OFFLINE is set; unset it once, or give a local directory"
        )
    why = (str(_cause(error)).strip() or type(error).__name__).split("\n")[0]
    return ClusterError(
        f"{name} is not a local directory, and fetching it from {constants.ENDPOINT} failed "
        f"({why}); check the network, or download it elsewhere and give its directory"
    )


def _cause(error: BaseException) -> BaseException:
    """What first went wrong: huggingface_hub wraps it in advice."""
    while (inner := error.__cause__) is not None:
        error = inner
    return error
