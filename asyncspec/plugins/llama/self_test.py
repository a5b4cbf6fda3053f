"""Start-up self-test: the fewest rows of a pass, found by trying.

The kernels that llama.cpp multiplies with are others for one row than for many, and with several
threads those of attention are as well, from 512 cells on. In exact mode it is the number with which
a row has the same bits alone and in trees, with fewer cells and with more; where none helps, the
stage's guarantee is "tolerance". In fast mode it is the one that takes least time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.base import CPU, Guarantee
from asyncspec.backend.probe_tree import ProbePass, ProbeTree
from asyncspec.backend.tree_stage import trial_clock
from asyncspec.core.jobs import Row
from asyncspec.plugins.llama.attention import OFF
from asyncspec.plugins.llama.cache_engine import EXACT_ROWS, CacheEngine, Floats, Settings
from asyncspec.plugins.llama.library import threads
from asyncspec.plugins.llama.passes import Engine
from asyncspec.plugins.llama.tree import TreeCache

_MIN_ROWS = (1, 2, 4, 8)

_F16 = 1
"""``GGML_TYPE_F16``"""

_REPEATS = 12  # of a measurement, whose least counts
_TRIAL_SECONDS = 0.5
"""After which there are no more repeats than three."""

_HIDDEN = "result_norm"
"""The tensor that the head reads."""

_TREE = ProbeTree(
    # llama.cpp attends to multiples of 256 cells. The path alone has no more than those; behind the
    # tree it has 512, and keys in the shares of several threads, whatever the window.
    prefix=232,
    siblings=(0, 2, 1, 4, 0, 3, 6, 11, 2, EXACT_ROWS - 2),
    levels=((0,), (1, 2), (3,), (4, 5), (6, 7), (8,), (9,)),
    pruned_after=3,
)


class SelfTest(Struct, frozen=True):
    """What the tests of a loaded stage have found."""

    min_rows: int
    guarantee: Guarantee

    def restore(self, engine: CacheEngine[Any]) -> None:
        """Set what the tests set of an engine of the same layers."""
        engine.settings = replace(engine.settings, min_rows=self.min_rows)


def run_tests(engine: CacheEngine[Any], vocab: int, *, embeds: bool) -> SelfTest:
    """Set the engine's fewest rows as its mode asks for, and say what holds with them.
    ``embeds``: rows are tokens."""
    guarantee: Guarantee = "tolerance"
    if not isinstance(engine, Engine):
        pass  # the bits of recurrent layers depend on how rows are cut into chains
    elif engine.settings.exact and engine.settings.flash == OFF:
        # Sums of values depend on the places of cells, which layers behind them may round away in
        # all the rows that a test computes.
        pass
    elif engine.settings.exact:
        guarantee = confirm(engine, vocab, embeds=embeds)
    else:
        prefer_faster(engine, embeds=embeds)
    return SelfTest(engine.settings.min_rows, guarantee)


def confirm(engine: Engine, vocab: int, *, embeds: bool) -> Guarantee:
    """Set the engine's fewest rows, and say what holds with them. ``embeds``: rows are tokens."""
    random = np.random.default_rng(0)
    count = _TREE.prefix + 2 * len(_TREE.siblings)
    inputs: Sequence[Any]
    if embeds:
        inputs = random.integers(vocab, size=count).tolist()
    else:
        inputs = list(random.standard_normal((count, engine.model.width), np.float32))
    engines = [engine]
    if not engine.last:
        # A quantised head rounds what it reads, so equal logits do not prove equal hidden states.
        engines.insert(0, Engine(engine.model, engine.settings, _HIDDEN, first=engine.first))
    prefixes = [_prefix(stage, inputs) for stage in engines]
    guarantee: Guarantee = "tolerance"
    for rows in _MIN_ROWS:
        if rows == 1 and _shares_keys(engine.settings):
            continue
        for stage in engines:
            stage.settings = replace(engine.settings, min_rows=rows)
        if all(map(_same_bits, engines, prefixes, repeat(inputs))):
            guarantee = "bitwise"
            break
    else:
        engine.settings = replace(engine.settings, min_rows=1)
    for prefix in prefixes:
        prefix.close()
    return guarantee


def _shares_keys(settings: Settings) -> bool:
    """Whether threads share the keys that a lone row attends to, whose sums they then add."""
    on_cpu = not settings.device and settings.kv_type == _F16 and settings.flash
    return bool(on_cpu) and threads() > 1


def prefer_faster(engine: Engine, *, embeds: bool) -> None:
    """Set the engine's fewest rows to two where a lone one takes longer, as one of F16 does on CPUs
    without AVX-512. ``embeds``: rows are tokens."""
    row: Any = 0 if embeds else np.random.default_rng(0).standard_normal(engine.model.width)
    lone, filled = engine.settings, replace(engine.settings, min_rows=2)
    least = dict.fromkeys((lone, filled), float("inf"))
    end = time.perf_counter() + _TRIAL_SECONDS
    for trial in range(_REPEATS):
        if trial >= 3 and time.perf_counter() >= end:
            break
        for settings in least:
            engine.settings = settings
            least[settings] = min(least[settings], _seconds(engine, row))
    engine.settings = min(least, key=least.__getitem__)


def _seconds(engine: Engine, row: Any) -> float:
    """Seconds of a pass of one row."""
    clock = trial_clock(engine.settings.device or CPU)
    tree = TreeCache(engine)
    start = clock()
    _results(engine, tree, 0, [Row(0, 0, (0,))], [row])
    end = clock()
    tree.close()
    return end - start


def _prefix(engine: Engine, inputs: Sequence[Any]) -> TreeCache:
    """A session of the rows before the path, which others begin like."""
    tree = TreeCache(engine)
    rows = [Row(slot, slot, tuple(range(slot + 1))) for slot in range(_TREE.prefix)]
    nodes = tree.grow(0, rows, inputs[: _TREE.prefix])
    engine.run([(tree.branches, node) for node in nodes], [False] * len(nodes))
    return tree


def _same_bits(engine: Engine, prefix: TreeCache, inputs: Sequence[Any]) -> bool:
    """Whether the path's rows are the same alone, in a tree, and alone behind the tree's cells."""
    engine.pack()
    first, *others = (
        _path(engine, prefix, inputs, passes())
        for passes in (_TREE.alone, _TREE.in_tree, _TREE.alone)
    )
    return all(np.array_equal(first, again, equal_nan=True) for again in others)


def _path(
    engine: Engine, prefix: TreeCache, inputs: Sequence[Any], passes: Iterable[ProbePass]
) -> Floats:
    """Results [n, width] of the path's rows."""
    tree, length = TreeCache(engine), _TREE.prefix
    tree.copy_prefix(prefix, length)
    results = []
    for part in passes:
        rows = [inputs[length + i] for i in part.inputs]
        results.append(_results(engine, tree, part.committed, part.rows, rows)[part.path_rows])
        if part.keep is not None:
            tree.compact(length, part.keep)
    tree.close()
    return np.concatenate(results)


def _results(
    engine: Engine, tree: TreeCache, committed: int, rows: Sequence[Row], inputs: Sequence[Any]
) -> Floats:
    """Logits [n, vocab] on the last stage, hidden states [n, width] before it."""
    nodes = tree.grow(committed, rows, inputs)
    result = engine.run([(tree.branches, node) for node in nodes], [not engine.last] * len(nodes))
    return result.captured[engine.last] if engine.last else result.logits
