"""Token sources by what a user writes, as in ``ngram``, ``twin:int8`` or ``eagle:DIR``.

Packages register a ``SourceKind`` under the entry point group ``asyncspec.sources``. Its name comes
first in what a user writes; a name that is no kind's is a draft model's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from asyncspec.registry import Registry
from asyncspec.source.base import TokenSource


class SourceKind(Struct, frozen=True, kw_only=True):
    """What the rest of the program needs to know of a kind of token source.

    Nodes load it, mixtures join it with others, and ``asyncspec memory`` counts it by these fields
    alone.
    """

    # Makes a source without a model, from the text behind the kind's name and a colon; raises
    # ``UserError`` for a text it cannot use. None: a backend loads it.
    make: Callable[[str], TokenSource] | None = None
    # The backend that loads it: its model's own, or the target's, for a part or a copy of that.
    loaded_by: Literal["model", "target"] = "model"
    # True where what follows the colon is the path or the id of a model.
    names_model: bool = False
    # True where it reads the target's hidden states: at most one source of a mixture does.
    reads_features: bool = False
    # True where earlier answers of a user change what it proposes.
    remembers: bool = False
    # False where it cannot be part of a mixture.
    mixes: bool = True
    # Bytes that a source without a model holds for each token of a session, and at most besides.
    token_bytes: int = 0
    shared_bytes: int = 0


SOURCES: Registry[SourceKind] = Registry("asyncspec.sources", "token source", SourceKind)
"""The installed kinds of token sources."""

MODEL = SourceKind(names_model=True)
"""A draft model, by its path or id alone."""

EAGLE = SourceKind(loaded_by="target", names_model=True, reads_features=True)
"""A head that reads the target's hidden states: EAGLE, DFlash."""

MTP = SourceKind(loaded_by="target", reads_features=True)
"""The next-token layers inside the target's checkpoint."""

TWIN = SourceKind(loaded_by="target")
"""The target itself, with fewer bits a weight."""

NONE = SourceKind(mixes=False)
"""No token source."""


def kind_of(source: str) -> SourceKind:
    """The kind of a token source that is no mixture."""
    name, colon, _ = source.partition(":")
    if name not in SOURCES:
        return MODEL
    kind = SOURCES[name]
    return MODEL if kind.names_model and not colon else kind


def make_source(source: str) -> TokenSource:
    """A source without a model. Raises ``UserError``."""
    make = kind_of(source).make
    assert make is not None, f"{source} is loaded by a backend"
    return make(source.partition(":")[2])


def needs_backend(source: str) -> bool:
    """Whether a backend loads a token source."""
    kind = kind_of(source)
    return kind.make is None and kind is not NONE
