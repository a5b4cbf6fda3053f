"""Tried at start: what this CPU's kernels do with zeros between terms and with few or many rows.

The recipe of exact mode rests on two properties of matrix products that no library promises
(docs/reference/exactness.md). Both are cheap to measure on the kernels, shapes and weights that
will be
used; what does not hold is done without, and if equality still fails the stage says "tolerance".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncspec.backend.base import Guarantee
from asyncspec.backend.hf.cache import TreeCache
from asyncspec.backend.hf.exact_attention import ExactAttention, chain_reach, strips_of
from asyncspec.backend.hf.kernels.cpu.capabilities import BLOCK, Recipe, Strips
from asyncspec.backend.hf.kernels.cpu.linear import RowLinear, RowwiseLinear
from asyncspec.backend.hf.probing import noise
from asyncspec.backend.hf.shard import Shard
from asyncspec.core.jobs import Row

_ROW_FLOORS = (1, 2, 4, 8, 16)
_SWEEP = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64)
_SHORT_SWEEP = (1, 2, 3, 5, 16, 17, 64)
_BIG_WEIGHT = 1 << 22
"""Elements; a larger weight is tried with fewer row counts, to keep the start short."""

_PREFIX = BLOCK - 3
_SIBLINGS = (2, 1, 4, 3, 6, 2)
"""Of each row of the path."""

_LEVELS = ((0,), (1, 2), (3,), (4, 5))
"""Of the path, pass by pass."""

_PATH = len(_SIBLINGS)


def choose_recipe(shard: Shard) -> Recipe:
    """Measure, and set the row floor of the loaded linear layers."""
    floors = [_set_floor(alike) for alike in _by_kind(shard.linears)]
    config = shard.model.config
    shape = shard.cache_shape("exact")
    groups = config.num_attention_heads // shape.kv_heads
    strips = strips_of(shape, groups)
    used = strips or Strips()
    return Recipe(
        reach=chain_reach(shape, groups, used),
        strips=used,
        min_rows=max(floor or _ROW_FLOORS[-1] for floor in floors),
        blind_rows=None not in floors and strips is not None,
        packed=all(x.packed for x in shard.linears if isinstance(x, RowLinear)),
    )


def _by_kind(linears: Sequence[RowwiseLinear]) -> list[list[RowwiseLinear]]:
    """Layers of different products have floors of their own."""
    kinds: dict[type, list[RowwiseLinear]] = {}
    for linear in linears:
        kinds.setdefault(linear.kind, []).append(linear)
    return list(kinds.values())


def _set_floor(linears: list[RowwiseLinear]) -> int | None:
    floor = row_floor(linears)
    for linear in linears:
        linear.min_rows = floor or _ROW_FLOORS[-1]
    return floor


def row_floor(linears: list[RowwiseLinear]) -> int | None:
    """Fewest rows from which on a row's result no longer depends on how many there are; None
    where that never ends."""
    # A matrix shared with the embedding (no bytes of its own) is multiplied as it lies.
    by_shape = {(x.in_features, x.out_features, x.weight_bytes): x for x in linears}
    fewest = max(x.fewest_rows for x in linears)
    agreed = {rows for rows in _SWEEP if rows >= fewest}
    for (width, height, _), linear in by_shape.items():
        sweep = _SWEEP if width * height <= _BIG_WEIGHT else _SHORT_SWEEP
        x = noise(max(sweep), width).to(linear.dtype)
        want = linear.sums(x[:16])
        for rows in agreed.intersection(sweep):
            common = min(rows, 16)
            if not torch.equal(linear.sums(x[:rows])[:common], want[:common]):
                agreed.discard(rows)
    for floor in _ROW_FLOORS:
        if all(rows in agreed for rows in _SWEEP if rows >= floor):
            return floor
    return None


def confirm(shard: Shard, recipe: Recipe) -> Guarantee:
    """Run layers of every kind over a short path, one row per pass, and again inside a tree."""
    if not recipe.blind_rows:
        return "tolerance"
    inputs = shard.noise(2 * _PATH)
    with shard.shortened():
        alone = _path_alone(shard, recipe, inputs)
        in_tree = _path_in_tree(shard, recipe, inputs)
    return "bitwise" if torch.equal(alone, in_tree) else "tolerance"


def _path_alone(shard: Shard, recipe: Recipe, inputs: torch.Tensor) -> torch.Tensor:
    """Outputs [_PATH, width] of the path's rows, one row per pass."""
    cache = _made_up(shard)
    outputs = []
    for i in range(_PATH):
        slot = _PREFIX + i
        row = Row(slot=slot, position=slot, visible=(slot,))
        outputs.append(_outputs(shard, recipe, cache, slot, [row], inputs[i : i + 1]))
    return torch.cat(outputs)


def _path_in_tree(shard: Shard, recipe: Recipe, inputs: torch.Tensor) -> torch.Tensor:
    """The same rows, each after siblings, in few passes; siblings keep their slots. The path's row
    is the last of a pass wherever a level is: what comes last is where vectors are ragged."""
    cache = _made_up(shard)
    line: list[int] = []
    slot, outputs = _PREFIX, []
    for levels in _LEVELS:
        rows: list[Row] = []
        given: list[int] = []
        own: list[int] = []
        for i in levels:
            for sibling in range(_SIBLINGS[i]):
                rows.append(Row(slot, _PREFIX + i, (*line, slot)))
                given.append(_PATH + (i + sibling) % _PATH)
                slot += 1
            line.append(slot)
            own.append(len(rows))
            rows.append(Row(slot, _PREFIX + i, tuple(line)))
            given.append(i)
            slot += 1
        outputs.append(_outputs(shard, recipe, cache, _PREFIX, rows, inputs[given])[own])
    return torch.cat(outputs)


def _made_up(shard: Shard) -> TreeCache:
    """A cache with a committed path of noise: quicker than computing one, and as telling."""
    shape = shard.cache_shape("exact")
    cache = TreeCache(shape, _PREFIX + _PATH + sum(_SIBLINGS))
    cache.reserve(_PREFIX)
    path = (shape.layers, shape.kv_heads, _PREFIX, shape.head_dim)
    keys, values = noise(*path), noise(*path, seed=1)
    for layer in range(shape.layers):
        cache.write(layer, slice(0, _PREFIX), keys[layer], values[layer])
    cache.positions[:_PREFIX] = range(_PREFIX)
    return cache


def _outputs(
    shard: Shard,
    recipe: Recipe,
    cache: TreeCache,
    committed: int,
    rows: list[Row],
    inputs: torch.Tensor,
) -> torch.Tensor:
    """Logits [n, vocab] on the last stage, hidden states [n, H] before it."""
    tree = ExactAttention(cache, committed, rows, recipe)
    positions = torch.tensor([row.position for row in rows])
    if shard.judges:
        return shard.logits(inputs, positions, tree, torch.arange(len(rows)))
    return shard.hidden(inputs, positions, tree)
