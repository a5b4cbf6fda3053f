"""The question to a token source, and its answer."""

from __future__ import annotations

from msgspec import Struct

from .ids import SessionId, Version


class Expand(Struct, array_like=True, frozen=True, tag="expand", gc=False):
    """Asks a token source to grow a tree. In one process: a computation's input."""

    session: SessionId
    version: Version
    # Length of the committed path before ``committed``; 0 opens the session at the source.
    base: int
    # Tokens committed since the source was last asked.
    committed: tuple[int, ...]
    # Levels to grow, children per node, and nodes wanted: the best (EAGLE-2's rule).
    depth: int
    width: int
    # 0 only moves the source's own context on (prefill).
    count: int
    # Nodes of a level that are expanded further; 0: as many as ``width``.
    beam: int = 0
    # Only the beam of a level stays (PipeDec's and SpecPipe's rule).
    fixed_width: bool = False
    # Children per node of each level, where levels differ (SpecInfer's shapes).
    widths: tuple[int, ...] = ()
    # A known part of the tree below the tip, as in ``Expanded``; the answer repeats what of it
    # leads to new nodes. Empty where growth starts at the tip.
    parents: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    # Where to grow from: indices into that part, or -1 for the tip. Empty: the tip alone.
    frontier: tuple[int, ...] = ()


class Expanded(Struct, array_like=True, frozen=True, tag="expanded", gc=False):
    """The answer to ``Expand``: best nodes first, every parent before its children."""

    session: SessionId
    version: Version
    # Length of the committed path the tree hangs from: tells a stale answer from a fresh one.
    base: int
    # Index into this very list, or -1 for the tip.
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    # Cumulative log-probability from the tip, in nats; never above the parent's.
    scores: tuple[float, ...]
    # Time the source's device spent on it, where that is not the draft node's own.
    seconds: float = 0.0


class Withdraw(Struct, array_like=True, frozen=True, tag="withdraw", gc=False):
    """What a source was asked for is of no use any more: it may answer at once with what it has."""

    session: SessionId
