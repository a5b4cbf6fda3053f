"""Names of models, token sources and chat templates, and what can be checked before a process is
started: instantly, without torch.

A token source is ``DIR``, ``eagle:DIR``, ``mtp``, ``twin``, ``ngram``, ``suffix``, ``none``, or a
mix of them joined by ``+``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import asyncspec
from asyncspec.backend.base import ModelInfo, twin_quantize
from asyncspec.backend.registry import backend_of, backend_of_source
from asyncspec.core.errors import UserError, reading
from asyncspec.core.paths import expanded
from asyncspec.source.registry import EAGLE_PREFIX, kind_of, make_source, needs_backend
from asyncspec_nodes.cluster.config import check_stages

MODELS = Path(asyncspec.__path__[0]) / "models"
BUNDLED_TARGET = MODELS / "demo-target"
BUNDLED_DRAFT = MODELS / "demo-draft"
BUNDLED_EAGLE = MODELS / "demo-eagle"

NGRAM = "ngram"
SUFFIX = "suffix"
NONE = "none"
LOOKUPS_ALONE = f"{NGRAM}+{SUFFIX}"

AUTO = "auto"
"""The best of what there is (``automatic.py``)."""

HYBRID = "hybrid"
"""The bundled draft model and n-gram lookup, in one tree."""


def _split(name: str) -> tuple[str, ...]:
    """At each plus that is not a part of a path that exists; the longest such path counts."""
    pieces, names = name.split("+"), list[str]()
    while pieces:
        joined = ("+".join(pieces[:count]) for count in range(len(pieces), 1, -1))
        path = next(
            (text for text in joined if _exists(text.removeprefix(EAGLE_PREFIX))), pieces[0]
        )
        names.append(path)
        pieces = pieces[path.count("+") + 1 :]
    return tuple(names)


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # no path at all
        return False


def parts(name: str) -> tuple[str, ...]:
    """The names of the sources in a mix. Raises ``UserError`` for an impossible mix."""
    sources = _split(name)
    if len(sources) == 1:
        return sources
    wrong = next((part for part in sources if not _mixes(part)), None)
    if wrong is not None:
        raise UserError(f"{name!r} mixes {wrong or 'nothing'!r} with something; leave it out")
    if len(set(sources)) < len(sources):
        raise UserError(f"{name!r} names a token source twice; leave one out")
    if sum(kind_of(part).reads_features for part in sources) > 1:
        raise UserError(f"{name!r} mixes two heads; only one can read the target's features")
    if sum(twin_quantize(part) is not None for part in sources) > 1:
        raise UserError(f"{name!r} mixes two twins of the target; leave one out")
    return sources


def _mixes(part: str) -> bool:
    return bool(part) and part not in (HYBRID, AUTO) and kind_of(part).mixes


def each(name: str, change: Callable[[str], str]) -> str:
    """The name with each of its parts changed. Raises as ``parts``."""
    return "+".join(map(change, parts(name)))


def check_target(target: str | Path, stages: int) -> ModelInfo:
    """Raise ``UserError`` where the target cannot serve in so many stages."""
    model_info = backend_of(str(target)).check_target(str(target))
    check_stages(stages, model_info.layers)
    return model_info


def check_draft(source: str, target: str | Path) -> str:
    """A token source as a cluster file names it. Raises ``UserError``."""

    def check(part: str) -> str:
        if not needs_backend(part):
            if part != NONE:
                make_source(part)
            return part
        return backend_of_source(part, str(target)).check_source(part, str(target))

    return each(spelled_out(source, target), check)


def check_learning(source: str) -> None:
    """Raise ``UserError`` where nothing of a token source can learn while it drafts."""
    if not any(kind_of(part).reads_features for part in parts(source)):
        raise UserError(
            f"[draft] learn: {source} cannot learn; take an EAGLE-3 or DFlash head made by "
            "asyncspec train-head (eagle:DIR), or leave learn out"
        )


def spelled_out(source: str, target: str | Path) -> str:
    """A token source's name without short ones. Raises ``UserError`` for targets not bundled."""
    if source == HYBRID:
        if Path(target) != BUNDLED_TARGET:
            raise UserError(f"{HYBRID} alone is the bundled target's own; use DIR+{NGRAM}")
        return f"{BUNDLED_DRAFT}+{NGRAM}"
    if EAGLE_PREFIX in parts(source) and Path(target) != BUNDLED_TARGET:
        raise UserError(
            f"{EAGLE_PREFIX} alone is the bundled target's own head; use {EAGLE_PREFIX}DIR"
        )
    return each(
        source, lambda part: f"{EAGLE_PREFIX}{BUNDLED_EAGLE}" if part == EAGLE_PREFIX else part
    )


def is_name(part: str) -> bool:
    """Whether a part of a token source names no file."""
    return part == AUTO or not kind_of(part).names_model


PLAIN = "plain"
"""For base models: the messages' texts, line by line."""

_PLAIN = "{{ bos_token or '' }}{% for message in messages %}{{ message.content }}\n{% endfor %}"


def read_template(name: str | None) -> str | None:
    """A Jinja template: a file's or ``PLAIN``; None: the tokenizer's own. Raises ``UserError``."""
    if name is None or name == PLAIN:
        return name and _PLAIN
    path = expanded(name)
    with reading(f"the chat template {name}"):
        return path.read_text(encoding="utf-8-sig")
