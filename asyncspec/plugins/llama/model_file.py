"""From what a user calls a GGUF model to its file: a path, or a file of a repository on the Hub.

``ORG/NAME/FILE.gguf`` names a file, ``ORG/NAME:QUANT`` one by its quantisation, as llama.cpp's
``-hf`` does; both with ``@REVISION`` after ``NAME``.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from asyncspec.backend.hub import HubName, download
from asyncspec.core.errors import CheckpointError
from asyncspec.core.paths import expanded

PREFIX = "llama:"
DEFAULT_QUANT = "Q4_K_M"
"""llama.cpp's own, of a repository without more."""

_HUB = re.compile(
    r"(?P<id>[\w.-]+/[\w.-]+?)(@(?P<revision>[^:]+?))?(:(?P<quant>[\w-]+)|/(?P<file>.+\.gguf))?"
)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class HubFile(Struct, frozen=True):
    """A GGUF file of a repository."""

    repository: HubName
    # Path in the repository; "": the file of ``quant``.
    file: str
    quant: str = DEFAULT_QUANT


def path_of(name: str) -> Path:
    """The path that a name stands for where it is local."""
    return expanded(name.removeprefix(PREFIX))


def short_name(name: str) -> str:
    """A model's name as users write it."""
    model = parse(name)
    if isinstance(model, Path):
        return _SHARD.sub("", model.name).removesuffix(".gguf")
    return Path(model.file or model.repository.id).name.removesuffix(".gguf")


def parse(name: str) -> Path | HubFile:
    """A local file, or one on the Hub. Raises ``CheckpointError`` for what is neither."""
    path, text = path_of(name), name.removeprefix(PREFIX)
    if path.is_file():
        return path
    if path.is_dir():
        return _only(path, _models(path.glob("*.gguf")), path)
    hub = None if text.startswith((".", "/", "~")) else _HUB.fullmatch(text)
    if hub is None or (hub["id"].endswith(".gguf") and not hub["file"]):
        raise CheckpointError(f"there is no file {path}; give a GGUF file")
    repository = HubName(hub["id"], hub["revision"])
    return HubFile(repository, hub["file"] or "", hub["quant"] or DEFAULT_QUANT)


def locate(name: str) -> Path:
    """The file of a model, the first where it is split; fetched where it is on the Hub. Raises as
    ``parse`` and ``download``."""
    model = parse(name)
    if isinstance(model, Path):
        return model
    if model.file:
        shard = _SHARD.search(model.file)
        pattern = glob.escape(model.file)
        if shard is not None:
            pattern = f"{glob.escape(model.file[: shard.start()])}-*-of-{shard[2]}.gguf"
        file = download(model.repository, [pattern]) / model.file
        if not file.is_file():
            raise CheckpointError(f"{model.repository} has no {model.file}; correct the name")
        return file
    # Q4_K_XL is not UD-Q4_K_XL, unless there is no other.
    models = _quantised(model, "[!D]") or _quantised(model)
    return _only(f"{model.repository} with {model.quant}", models, model.repository)


def _quantised(model: HubFile, prefix: str = "") -> list[Path]:
    """Models of a quantisation, with ``prefix`` in front of its separator."""
    cases = (model.quant.upper(), model.quant.lower())
    ends = (".gguf", "-*-of-*.gguf")
    patterns = [f"*{prefix}[-.]{quant}{end}" for quant in cases for end in ends]
    snapshot = download(model.repository, patterns)
    return _models(file for pattern in patterns for file in snapshot.rglob(pattern))


def _models(files: Iterable[Path]) -> list[Path]:
    """The first file of each model among ``files``."""
    return sorted(
        file
        for file in {*files}
        if not file.name.startswith("mmproj")  # encoders of images
        and ((shard := _SHARD.search(file.name)) is None or int(shard[1]) == 1)
    )


def _only(whose: object, models: list[Path], where: object) -> Path:
    if len(models) == 1:
        return models[0]
    count = len(models) or "no"
    raise CheckpointError(f"{whose} has {count} GGUF models; name the file: {where}/FILE.gguf")
