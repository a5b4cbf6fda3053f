"""An EAGLE head's files, checked against its target: safetensors, or the ``pytorch_model.bin`` that
most of the first heads were published as."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from msgspec import Struct

from asyncspec.backend.base import ModelInfo
from asyncspec.core.errors import CheckpointError, first_line
from asyncspec.plugins.hf.checkpoint.checkpoint import read_tensor
from asyncspec.plugins.hf.checkpoint.files.headers import TensorInfo, list_tensors
from asyncspec.plugins.hf.checkpoint.files.hub import locate
from asyncspec.plugins.hf.checkpoint.files.stored import TORCH_DTYPES
from asyncspec.plugins.hf.heads.eagle.description import HeadDescription
from asyncspec.plugins.hf.heads.eagle.geometry import describe, pickled


class Stored(Struct, frozen=True):
    """A tensor that is not read yet."""

    shape: tuple[int, ...]
    # As stored; None for whole numbers in safetensors, and for types that are not read.
    dtype: torch.dtype | None
    # Reads it as a floating-point, integer or truth type; raises ``CheckpointError`` where it is
    # stored as another kind of number, or is not finite.
    read: Callable[[torch.dtype], torch.Tensor]


class EagleCheckpoint(Struct, frozen=True):
    """A head's directory whose files were looked through and fit together and to the target."""

    path: Path
    description: HeadDescription
    # By the names of ``description``.
    tensors: Mapping[str, Stored]
    # The target's id of every token the head can propose; None: they are the same.
    ids: torch.Tensor | None
    # By the same names as ``tensors``, those in the file.
    names: Mapping[str, str]


def open_eagle(name: str | Path, target: ModelInfo) -> EagleCheckpoint:
    """Look through a head made for ``target``, in a directory or on the Hub, without reading its
    weights. Raises ``CheckpointError`` with the tensor, shape or setting that is wrong."""
    path = locate(name, pickled=True)
    if files := pickled(path):
        contents = {name: stored for file in files for name, stored in _unpickle(file).items()}
    else:
        contents = {
            name: Stored(info.shape, TORCH_DTYPES.get(info.dtype), partial(_read, name, info))
            for name, info in list_tensors(path).items()
        }
    head, names = describe(path, {key: tensor.shape for key, tensor in contents.items()}, target)
    tensors = {plain: contents[stored] for plain, stored in names.items()}
    ids = None
    if "d2t" in tensors:
        t2d = tensors["t2d"].read(torch.bool) if "t2d" in tensors else None
        ids = _target_ids(tensors["d2t"].read(torch.int64), t2d, head.vocab_size, path)
    return EagleCheckpoint(path, head, tensors, ids, names)


def _read(name: str, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return finite(name, info.file, read_tensor(info, dtype))
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(info.file, framework="pt") as opened:
            return _convert(name, info.file, opened.get_tensor(name), dtype)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{info.file} cannot be read ({error})") from error


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
        reason = first_line(error)
        raise CheckpointError(f"{file} cannot be read ({reason}); download it again") from error
    if not isinstance(content, dict) or not all(
        isinstance(tensor, torch.Tensor) for tensor in content.values()
    ):
        raise CheckpointError(f"{file} holds something else than named tensors; give an EAGLE head")
    return {
        name: Stored(tuple(tensor.shape), tensor.dtype, partial(_convert, name, file, tensor))
        for name, tensor in content.items()
    }


def _convert(name: str, file: Path, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_floating_point:
        if tensor.dtype.is_floating_point:
            raise CheckpointError(
                f"tensor {name} of {file} holds fractions, expected whole numbers"
            )
        return tensor.to(dtype)
    if tensor.dtype not in TORCH_DTYPES.values():
        raise CheckpointError(f"{file} holds {tensor.dtype} weights; use an unquantised one")
    # A copy in any case: the file is only mapped.
    return finite(name, file, tensor.detach().to(dtype, copy=True))


def finite(name: str, file: Path, tensor: torch.Tensor) -> torch.Tensor:
    """Raises ``CheckpointError`` where a number is none: nothing would ever be proposed."""
    # A sum takes no memory, but may be infinite where the numbers are not.
    if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not tensor.isfinite().all():
        raise CheckpointError(
            f"tensor {name} of {file} holds NaN or infinite numbers; download it again"
        )
    return tensor


def _target_ids(
    d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int, path: Path
) -> torch.Tensor:
    """The target's id of every draft token, int64 [draft vocabulary].

    ``d2t`` holds offsets (id = i + d2t[i]), and ``t2d`` [vocab] whether a token is in the reduced
    vocabulary. A head with a wrong table would never be right: raises ``CheckpointError``.
    """
    ids = torch.arange(len(d2t)) + d2t
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if len(outside):
        at = int(outside[0])
        raise CheckpointError(
            f"tensor d2t of the EAGLE-3 head {path} sends draft token {at} to {int(ids[at])} "
            f"(entry + index), expected an id below the target's vocabulary of {vocab_size}"
        )
    in_order = ids.sort().values
    if bool((in_order.diff() == 0).any()):
        raise CheckpointError(
            f"tensor d2t of the EAGLE-3 head {path} sends two draft tokens to one token; expected "
            "offsets from each draft token's own index"
        )
    if t2d is not None and not torch.equal(t2d.nonzero()[:, 0], in_order):
        raise CheckpointError(
            f"tensors d2t and t2d of the EAGLE-3 head {path} name different tokens; download it "
            "again"
        )
    return ids


def warn_of_verifier(head: EagleCheckpoint, target: str | Path) -> None:
    """Log a warning where a head names another target than this; copies have other names."""
    named = head.description.verifier.rpartition("/")[2]
    # The Hub's cache keeps models--OWNER--NAME/snapshots/COMMIT.
    here = next((p for p in Path(target).parts if p.startswith("models--")), Path(target).name)
    if named and named.lower() != here.rpartition("--")[2].lower():
        logging.getLogger(__name__).warning(
            "the head %s was made for %s, the target is %s: if that is no copy of it, few tokens "
            "will be accepted",
            head.path,
            head.description.verifier,
            target,
        )
