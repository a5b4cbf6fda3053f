"""Start-up self-test of exact mode: whether a row has the same bits alone and in trees.

The kernels that llama.cpp multiplies with are others for one row than for many, so the fewest rows
of a pass are found by trying; where no number helps, the stage's guarantee is "tolerance".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from asyncspec.backend.base import Guarantee
from asyncspec.backend.llama.engine import EXACT_ROWS, Engine, Floats
from asyncspec.backend.llama.tree import TreeCache
from asyncspec.core.jobs import Row

_MIN_ROWS = (1, 2, 4, 8)

_PREFIX = 67
"""Committed rows: more than one pass of them."""

_SIBLINGS = (0, 2, 1, 4, 0, 3, 6, 11, 2, EXACT_ROWS - 2)
"""Of each row of the path."""

_LEVELS = ((0,), (1, 2), (3,), (4, 5), (6, 7), (8,), (9,))
"""Of the path, pass by pass."""

_PRUNED_AFTER = 3
"""The pass after which siblings are pruned."""

_PATH = len(_SIBLINGS)


def confirm(engine: Engine, vocab: int, *, embeds: bool) -> Guarantee:
    """Set the engine's fewest rows, and say what holds with them. ``embeds``: rows are tokens."""
    random = np.random.default_rng(0)
    given: Sequence[Any]
    if embeds:
        given = random.integers(vocab, size=_PREFIX + 2 * _PATH).tolist()
    else:
        shape = (_PREFIX + 2 * _PATH, engine.model.width)
        given = list(random.standard_normal(shape, np.float32))
    for rows in _MIN_ROWS:
        engine.settings = replace(engine.settings, min_rows=rows)
        if np.array_equal(_alone(engine, given), _in_tree(engine, given), equal_nan=True):
            return "bitwise"
    engine.settings = replace(engine.settings, min_rows=1)
    return "tolerance"


def _alone(engine: Engine, given: Sequence[Any]) -> Floats:
    """Results [_PATH, width] of the path's rows, one row per pass."""
    tree = _prefix(engine, given)
    found = []
    for i in range(_PATH):
        slot = _PREFIX + i
        row = Row(slot, slot, (slot,))
        found.append(_results(engine, tree, slot, [row], [given[_PREFIX + i]]))
    tree.close()
    return np.concatenate(found)


def _in_tree(engine: Engine, given: Sequence[Any]) -> Floats:
    """The same rows, each after siblings, in few passes."""
    tree = _prefix(engine, given)
    path: list[int] = []
    slot, found = _PREFIX, []
    for number, levels in enumerate(_LEVELS):
        rows: list[Row] = []
        inputs: list[Any] = []
        own: list[int] = []
        for i in levels:
            for sibling in range(_SIBLINGS[i]):
                rows.append(Row(slot, _PREFIX + i, (*path, slot)))
                inputs.append(given[_PREFIX + _PATH + (i + sibling) % _PATH])
                slot += 1
            path.append(slot)
            own.append(len(rows))
            rows.append(Row(slot, _PREFIX + i, tuple(path)))
            inputs.append(given[_PREFIX + i])
            slot += 1
        found.append(_results(engine, tree, _PREFIX, rows, inputs)[own])
        if number == _PRUNED_AFTER:
            tree.compact(_PREFIX, path)
            path = list(range(_PREFIX, _PREFIX + len(path)))
            slot = path[-1] + 1
    tree.close()
    return np.concatenate(found)


def _prefix(engine: Engine, given: Sequence[Any]) -> TreeCache:
    tree = TreeCache(engine)
    rows = [Row(slot, slot, tuple(range(slot + 1))) for slot in range(_PREFIX)]
    _results(engine, tree, 0, rows, given[:_PREFIX])
    return tree


def _results(
    engine: Engine, tree: TreeCache, committed: int, rows: Sequence[Row], given: Sequence[Any]
) -> Floats:
    """Logits [n, vocab] on the last stage, hidden states [n, width] before it."""
    nodes = tree.grow(committed, rows, given)
    found = engine.run([(tree.branches, node) for node in nodes], [not engine.last] * len(nodes))
    return found.captured[engine.last] if engine.last else found.logits
