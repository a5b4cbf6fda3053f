"""Start-up self-test: the fewest rows of a pass, found by trying.

The kernels that llama.cpp multiplies with are others for one row than for many. In exact mode it is
the number with which a row has the same bits alone and in trees; where none helps, the stage's
guarantee is "tolerance". In fast mode it is the one that takes least time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from asyncspec.backend.base import CPU, Guarantee
from asyncspec.backend.llama.passes import EXACT_ROWS, Engine, Floats
from asyncspec.backend.llama.tree import TreeCache
from asyncspec.backend.probe_tree import ProbePass, ProbeTree
from asyncspec.backend.tree_stage import trial_clock
from asyncspec.core.jobs import Row

_MIN_ROWS = (1, 2, 4, 8)

_REPEATS = 12  # of a measurement, whose least counts
_TRIAL_SECONDS = 0.5
"""After which there are no more repeats than three."""

_HIDDEN = "result_norm"
"""The tensor that the head reads."""

_TREE = ProbeTree(
    prefix=67,  # more than one pass of them
    siblings=(0, 2, 1, 4, 0, 3, 6, 11, 2, EXACT_ROWS - 2),
    levels=((0,), (1, 2), (3,), (4, 5), (6, 7), (8,), (9,)),
    pruned_after=3,
)


def confirm(engine: Engine, vocab: int, *, embeds: bool) -> Guarantee:
    """Set the engine's fewest rows, and say what holds with them. ``embeds``: rows are tokens."""
    random = np.random.default_rng(0)
    count = _TREE.prefix + 2 * len(_TREE.siblings)
    given: Sequence[Any]
    if embeds:
        given = random.integers(vocab, size=count).tolist()
    else:
        given = list(random.standard_normal((count, engine.model.width), np.float32))
    # A quantised head rounds what it reads, so equal logits do not prove equal hidden states.
    engines = [engine] if engine.last else [Engine(engine.model, engine.settings, _HIDDEN), engine]
    for rows in _MIN_ROWS:
        for one in engines:
            one.settings = replace(engine.settings, min_rows=rows)
        if all(_same_bits(one, given) for one in engines):
            return "bitwise"
    engine.settings = replace(engine.settings, min_rows=1)
    return "tolerance"


def prefer_faster(engine: Engine, *, embeds: bool) -> None:
    """Set the engine's fewest rows to two where a lone one takes longer, as one of F16 does on CPUs
    without AVX-512. ``embeds``: rows are tokens."""
    given: Any = 0 if embeds else np.random.default_rng(0).standard_normal(engine.model.width)
    lone, filled = engine.settings, replace(engine.settings, min_rows=2)
    least = dict.fromkeys((lone, filled), float("inf"))
    end = time.perf_counter() + _TRIAL_SECONDS
    for repeat in range(_REPEATS):
        if repeat >= 3 and time.perf_counter() >= end:
            break
        for settings in least:
            engine.settings = settings
            least[settings] = min(least[settings], _seconds(engine, given))
    engine.settings = min(least, key=least.__getitem__)


def _seconds(engine: Engine, given: Any) -> float:
    """Of a pass of one row."""
    clock = trial_clock(engine.settings.device or CPU)
    tree = TreeCache(engine)
    start = clock()
    _results(engine, tree, 0, [Row(0, 0, (0,))], [given])
    end = clock()
    tree.close()
    return end - start


def _same_bits(engine: Engine, given: Sequence[Any]) -> bool:
    alone, in_tree = (_path(engine, given, x) for x in (_TREE.alone(), _TREE.in_tree()))
    return np.array_equal(alone, in_tree, equal_nan=True)


def _path(engine: Engine, given: Sequence[Any], passes: Iterable[ProbePass]) -> Floats:
    """Results [n, width] of the path's rows."""
    tree, prefix = TreeCache(engine), _TREE.prefix
    rows = [Row(slot, slot, tuple(range(slot + 1))) for slot in range(prefix)]
    _results(engine, tree, 0, rows, given[:prefix])
    found = []
    for one in passes:
        inputs = [given[prefix + i] for i in one.inputs]
        found.append(_results(engine, tree, one.committed, one.rows, inputs)[one.own])
        if one.keep is not None:
            tree.compact(prefix, one.keep)
    tree.close()
    return np.concatenate(found)


def _results(
    engine: Engine, tree: TreeCache, committed: int, rows: Sequence[Row], given: Sequence[Any]
) -> Floats:
    """Logits [n, vocab] on the last stage, hidden states [n, width] before it."""
    nodes = tree.grow(committed, rows, given)
    found = engine.run([(tree.branches, node) for node in nodes], [not engine.last] * len(nodes))
    return found.captured[engine.last] if engine.last else found.logits
