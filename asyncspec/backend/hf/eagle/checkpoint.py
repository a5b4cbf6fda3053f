"""An EAGLE head, opened: its sizes and the list of its tensors, checked against its target, with
no weights read yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from msgspec import Struct

from asyncspec.backend.hf.eagle.describe import describe
from asyncspec.backend.hf.eagle.geometry import Geometry
from asyncspec.backend.hf.eagle.tensors import Stored, open_tensors
from asyncspec.backend.hf.eagle.vocabulary import target_ids
from asyncspec.backend.hf.hub import locate
from asyncspec.backend.hf.inspect import Facts


class EagleCheckpoint(Struct, frozen=True):
    """A head's directory whose files were looked through and fit together and to the target."""

    path: Path
    geometry: Geometry
    # By their names in EAGLE's own code.
    tensors: Mapping[str, Stored]
    # The target's id of every token the head can propose; None: they are the same.
    ids: torch.Tensor | None


def open_eagle(name: str | Path, target: Facts) -> EagleCheckpoint:
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
