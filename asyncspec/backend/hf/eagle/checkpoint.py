"""The tensors of an EAGLE head, whichever way they are stored: safetensors, or the
``pytorch_model.bin`` most of the first heads were published as."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from msgspec import Struct

from asyncspec.backend.base import ModelInfo
from asyncspec.backend.hf.checkpoint import TORCH_DTYPES, read_tensor
from asyncspec.backend.hf.checkpoint_files import TensorInfo, list_tensors
from asyncspec.backend.hf.eagle.geometry import Geometry, describe, pickled
from asyncspec.backend.hf.hub import locate
from asyncspec.core.errors import CheckpointError


class Stored(Struct, frozen=True):
    """A tensor that is not read yet."""

    shape: tuple[int, ...]
    # As stored; None for whole numbers in safetensors, and for types that are not read.
    dtype: torch.dtype | None
    # Reads it as a floating-point, integer or truth type; ``CheckpointError`` where that is not
    # what is stored.
    read: Callable[[torch.dtype], torch.Tensor]


def open_tensors(directory: Path) -> dict[str, Stored]:
    """All tensors of a head by their stored names. Raises ``CheckpointError`` where a file is
    missing or broken."""
    if files := pickled(directory):
        return {name: stored for file in files for name, stored in _unpickle(file).items()}
    return {
        name: Stored(info.shape, TORCH_DTYPES.get(info.dtype), partial(_read, name, info))
        for name, info in list_tensors(directory).items()
    }


def _read(name: str, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return read_tensor(info, dtype)
    from safetensors import SafetensorError, safe_open

    if info.dtype in TORCH_DTYPES:
        raise _not_whole(name, info.file)
    try:
        with safe_open(info.file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{info.file} cannot be read ({error})") from error
    return tensor.to(dtype)


def _unpickle(file: Path) -> dict[str, Stored]:
    try:
        content = torch.load(
            file,
            map_location="cpu",
            # Nothing but tensors: a pickle may otherwise run any program.
            weights_only=True,
            # Files older than torch 1.6 are no archives and must be read whole.
            mmap=zipfile.is_zipfile(file),
        )
    except Exception as error:  # a broken pickle may fail in any way
        why = str(error).strip().split("\n")[0]
        raise CheckpointError(f"{file} cannot be read ({why}); download it again") from error
    if not isinstance(content, dict) or not all(
        isinstance(t, torch.Tensor) for t in content.values()
    ):
        raise CheckpointError(f"{file} holds something else than named tensors; give an EAGLE head")
    return {
        str(name): Stored(
            tuple(tensor.shape), tensor.dtype, partial(_convert, str(name), file, tensor)
        )
        for name, tensor in content.items()
    }


def _convert(name: str, file: Path, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        if tensor.dtype not in TORCH_DTYPES.values():
            raise CheckpointError(f"{file} holds {tensor.dtype} weights; use an unquantised one")
        # A copy in any case: the file is only mapped.
        return tensor.detach().to(dtype, copy=True)
    if tensor.dtype.is_floating_point:
        raise _not_whole(name, file)
    return tensor.to(dtype)


def _not_whole(name: str, file: Path) -> CheckpointError:
    return CheckpointError(f"tensor {name} of {file} holds fractions, expected whole numbers")


# --- A reduced draft vocabulary: which of the target's tokens an EAGLE-3 head can propose.


def target_ids(
    d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int, where: Path
) -> torch.Tensor:
    """The target's id of every draft token, int64 [draft vocabulary].

    ``d2t`` holds offsets (id = i + d2t[i]) and ``t2d`` [vocab] who is in. A wrong table would show
    as nothing but guesses that are never right, so it is refused: ``CheckpointError``.
    """
    ids = torch.arange(len(d2t)) + d2t
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        at = int((ids == bad).nonzero()[0])
        raise CheckpointError(
            f"tensor d2t of the EAGLE-3 head {where} sends draft token {at} to {bad} (entry + "
            f"index), expected an id below the target's vocabulary of {vocab_size}"
        )
    in_order = ids.sort().values
    if bool((in_order.diff() == 0).any()):
        raise CheckpointError(
            f"tensor d2t of the EAGLE-3 head {where} sends two draft tokens to one token; "
            "expected offsets from each draft token's own index"
        )
    if t2d is not None and not torch.equal(t2d.nonzero()[:, 0], in_order):
        raise CheckpointError(
            f"tensors d2t and t2d of the EAGLE-3 head {where} name different tokens; "
            "download it again"
        )
    return ids


# --- An EAGLE head, opened: its sizes and the list of its tensors, checked against its target,
# with no weights read yet.


class EagleCheckpoint(Struct, frozen=True):
    """A head's directory whose files were looked through and fit together and to the target."""

    path: Path
    geometry: Geometry
    # By their names in EAGLE's own code.
    tensors: Mapping[str, Stored]
    # The target's id of every token the head can propose; None: they are the same.
    ids: torch.Tensor | None


def open_eagle(name: str | Path, target: ModelInfo) -> EagleCheckpoint:
    """Look through a head made for ``target``: EAGLE-1/2 or EAGLE-3, in a directory or on the Hub.

    Raises ``CheckpointError`` with the tensor, shape or setting that is wrong.
    """
    path = locate(name, pickled=True)
    found = open_tensors(path)
    geometry, names = describe(path, {key: tensor.shape for key, tensor in found.items()}, target)
    tensors = {plain: found[stored] for plain, stored in names.items()}
    ids = None
    if "d2t" in tensors:
        t2d = tensors["t2d"].read(torch.bool) if "t2d" in tensors else None
        ids = target_ids(tensors["d2t"].read(torch.int64), t2d, geometry.vocab_size, path)
    return EagleCheckpoint(path=path, geometry=geometry, tensors=tensors, ids=ids)
