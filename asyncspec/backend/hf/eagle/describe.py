"""What an EAGLE head is, from its configuration and its tensors' shapes, checked. No torch."""

from __future__ import annotations

from pathlib import Path

from asyncspec.backend.hf.eagle.geometry import Geometry, Shapes, geometry_of, kind_of
from asyncspec.backend.hf.eagle.layout import check_layout, ignored, plain_name
from asyncspec.backend.hf.eagle.settings import Settings
from asyncspec.backend.hf.hub import locate
from asyncspec.backend.hf.inspect import Facts
from asyncspec.backend.hf.weights import INDEX, SINGLE, list_tensors


def describe(directory: Path, stored: Shapes, target: Facts) -> tuple[Geometry, dict[str, str]]:
    """The sizes of a head made for ``target``, and where its tensors are: name in EAGLE's own code
    -> stored name. ``stored``: shapes by stored name.

    Raises ``CheckpointError`` with the tensor, shape or setting that is wrong.
    """
    settings = Settings(directory)
    kind = kind_of([plain_name(name, "EAGLE") for name in stored], settings)
    named = {plain_name(name, kind): name for name in stored}
    names = {plain: name for plain, name in named.items() if not ignored(plain, kind)}
    shapes = {plain: stored[name] for plain, name in names.items()}
    geometry = geometry_of(kind, settings, shapes, target)
    check_layout(shapes, geometry, directory)
    return geometry, names


def check_head(name: str | Path, target: Facts) -> Path:
    """The directory of a head made for ``target``, so far as can be said without torch: of
    pickled weights nothing but that they are there. Raises ``CheckpointError``."""
    directory = locate(name, pickled=True)
    if pickled(directory):
        Settings(directory)
    else:
        stored = {name: info.shape for name, info in list_tensors(directory).items()}
        describe(directory, stored, target)
    return directory


def pickled(directory: Path) -> list[Path]:
    """The files of a head that is stored as ``pytorch_model*.bin`` and in no better way."""
    if any((directory / name).is_file() for name in (SINGLE, INDEX)):
        return []
    return sorted(directory.glob("pytorch_model*.bin"))
