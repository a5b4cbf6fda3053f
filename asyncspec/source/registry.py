"""Token sources by what a user writes, as in ``ngram``, ``twin:int8`` or ``eagle:DIR``.

Packages register a ``SourceKind`` under the entry point group ``asyncspec.sources``. Its name comes
first in what a user writes; a name that is no kind's is a draft model's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from asyncspec.core.errors import UserError
from asyncspec.registry import Registry
from asyncspec.source.base import TokenSource


class SourceKind(Struct, frozen=True, kw_only=True):
    """What the rest of the program needs to know of a kind of token source.

    Nodes load it, mixtures join it with others, and ``asyncspec memory`` counts it by these fields
    alone.
    """

    # Makes a source without a model; None: a backend loads it. Where ``takes_setting`` is true, it
    # is called with the text behind the kind's name and a colon, and raises ``UserError`` for a
    # text it cannot use; elsewhere without arguments.
    make: Callable[..., TokenSource] | None = None
    takes_setting: bool = False
    # False where there is no source at all: drafts are never asked for.
    proposes: bool = True
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

EAGLE_PREFIX = "eagle:"
"""What the name of an EAGLE head begins with; its directory follows."""

EAGLE = SourceKind(loaded_by="target", names_model=True, reads_features=True)
"""A head that reads the target's hidden states: EAGLE, DFlash."""

MTP_NAME = "mtp"

MTP = SourceKind(loaded_by="target", reads_features=True)
"""The next-token layers inside the target's checkpoint."""

TWIN_NAME = "twin"

TWIN = SourceKind(loaded_by="target")
"""The target itself, with fewer bits a weight."""

NONE = SourceKind(mixes=False, proposes=False)
"""No token source."""


def kind_of(source: str) -> SourceKind:
    """The kind of a token source that is no mixture."""
    name, colon, _ = source.partition(":")
    if name not in SOURCES:
        return MODEL
    kind = SOURCES[name]
    return MODEL if kind.names_model and not colon else kind


def make_source(source: str) -> TokenSource:
    """A source without a model. Raises ``UserError`` for a setting that its kind does not take."""
    kind, (name, _, setting) = kind_of(source), source.partition(":")
    if setting and not kind.takes_setting:
        raise UserError(f"{name} takes no setting; write {name} instead of {source}")
    assert kind.make is not None, f"{source} is loaded by a backend"
    return kind.make(setting) if kind.takes_setting else kind.make()


def needs_backend(source: str) -> bool:
    """Whether a backend loads a token source."""
    kind = kind_of(source)
    return kind.make is None and kind.proposes
