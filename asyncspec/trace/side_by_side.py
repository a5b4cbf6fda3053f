"""How segments that shared a pass are drawn, and trees that grew together. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.trace.timeline import Span

_SHARED = ("compute", "draft")


def side_by_side(spans: Sequence[Span]) -> list[Span]:
    """Segments that share a pass (or trees a batch), one after the other, each as long as its share
    of the rows: so each can be seen and clicked, and its device is as busy as it was."""
    passes: dict[tuple[int, float, float], list[Span]] = {}
    for span in spans:
        if span.kind in _SHARED:
            passes.setdefault((span.rank, span.at, span.until), []).append(span)
    drawn = [span for span in spans if span.kind not in _SHARED]
    for parts in passes.values():
        drawn += parts if len(parts) == 1 else _in_turn(parts)
    return sorted(drawn, key=lambda span: (span.at, span.until, span.rank))


def _in_turn(parts: Sequence[Span]) -> list[Span]:
    total = sum(map(_weight, parts)) or 1
    at, length = parts[0].at, parts[0].until - parts[0].at
    drawn, before = [], 0
    for part in parts:
        start, before = before, before + _weight(part)
        edges = [at + length * rows / total for rows in (start, before)]
        drawn.append(replace(part, at=edges[0], until=edges[1]))
    return drawn


def _weight(part: Span) -> int:
    """Who only reads its prompt asks for no nodes, and is to be seen too."""
    return part.rows or int(part.kind == "draft")
