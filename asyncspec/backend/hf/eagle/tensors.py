"""The tensors of an EAGLE head, whichever way they are stored: safetensors, or the
``pytorch_model.bin`` most of the first heads were published as."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from msgspec import Struct

from asyncspec.backend.hf.checkpoint import TORCH_DTYPES, read_tensor
from asyncspec.backend.hf.eagle.describe import pickled
from asyncspec.backend.hf.weights import TensorInfo, list_tensors
from asyncspec.errors import CheckpointError


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
