"""Start-up self-test of exact mode (docs/reference/exactness.md): what this CPU's kernels do with
zeros between terms and with few or many rows, on the shapes and weights that will be used.

A property that does not hold is not relied on; if equality still fails, the stage's guarantee is
"tolerance".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from msgspec import Struct
from torch import Tensor

from asyncspec.backend.base import Guarantee
from asyncspec.backend.probe_tree import ProbePass, ProbeTree
from asyncspec.core.kv_slots import BLOCK
from asyncspec.plugins.hf.attention.batched_attention import attention_of
from asyncspec.plugins.hf.attention.block_attention import block_rows
from asyncspec.plugins.hf.attention.cache import (
    ONES,
    KVCache,
    LayerShape,
    attention_shapes,
    state_shapes,
)
from asyncspec.plugins.hf.kernels.accelerator.linear import EXACT_BUCKETS, DeviceLinear
from asyncspec.plugins.hf.kernels.cpu.capabilities import MAX_K, KernelSettings, RowTiles
from asyncspec.plugins.hf.kernels.cpu.dense import tune_min_rows
from asyncspec.plugins.hf.kernels.cpu.half_precision import scores_type
from asyncspec.plugins.hf.kernels.cpu.linear import RowwiseLinear
from asyncspec.plugins.hf.kernels.device import CPU, Device
from asyncspec.plugins.hf.kernels.probing import noise
from asyncspec.plugins.hf.model.optimized.graphs import LayerGraph
from asyncspec.plugins.hf.model.shard import Shard

LinearT = TypeVar("LinearT", bound=RowwiseLinear)

_MIN_ROWS = (1, 2, 4, 8, 16)
_ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64)
_FEW_ROW_COUNTS = (1, 2, 3, 5, 16, 17, 64)
_LARGE_WEIGHT = 1 << 22
"""Elements; a larger weight is tried with fewer row counts, to keep the start short."""


class SelfTest(Struct, frozen=True):
    """What the tests of a loaded stage have found."""

    settings: KernelSettings
    guarantee: Guarantee
    # Its linear layers have them, in their order.
    min_rows: tuple[int, ...]

    def fits(self, shard: Shard) -> bool:
        """Whether it can be a result of this stage."""
        return len(self.min_rows) == len(shard.linears)

    def restore(self, shard: Shard) -> None:
        """Set what the tests set of a stage with the same layers."""
        for linear, rows in zip(shard.linears, self.min_rows, strict=True):
            linear.min_rows = rows
        shard.pad_to(self.settings.buckets)


def run_tests(shard: Shard) -> SelfTest:
    """Choose how a loaded stage computes, and say what holds then."""
    settings = choose_settings(shard)
    tune_min_rows(shard.linears)
    guarantee = confirm(shard, settings)
    return SelfTest(settings, guarantee, tuple(linear.min_rows for linear in shard.linears))


def choose_settings(shard: Shard) -> KernelSettings:
    """Measure the kernels, and set ``min_rows`` or buckets of the loaded linear layers."""
    if shard.device.is_accelerator:
        return _choose_buckets(shard)
    kinds: dict[type, list[RowwiseLinear]] = defaultdict(list)
    for linear in shard.linears:
        # A pass goes through both graphs of a layer, with the same rows.
        kinds[LayerGraph if isinstance(linear, LayerGraph) else type(linear)].append(linear)
    min_rows = [min_invariant_rows(linears) for linears in kinds.values()]
    for linears, least in zip(kinds.values(), min_rows, strict=True):
        for linear in linears:
            linear.min_rows = least or _MIN_ROWS[-1]
    shape = shard.cache_shape("exact")
    layers = {*attention_shapes(shape.layers).values()}
    invariant_tiles = row_tiles_of(layers, shape.dtype)
    tiles = invariant_tiles or RowTiles()
    max_k = min((max_masked_k(layer, tiles) for layer in layers), default=MAX_K)
    return KernelSettings(
        max_k=max_k,
        row_tiles=tiles,
        block_rows=block_rows_of(layers, shape.dtype, max_k),
        min_rows=max(linear.min_rows for linear in shard.linears),
        row_invariant=None not in min_rows and invariant_tiles is not None,
    )


def _choose_buckets(shard: Shard) -> KernelSettings:
    """On an accelerator, whose products have a few shapes alone: the buckets in all of which a row
    has the same bits, wherever it is. Without such buckets rows are not invariant."""
    shape, device = shard.cache_shape("exact"), shard.device
    layers = {*attention_shapes(shape.layers).values()}
    groups = max((layer.groups for layer in layers), default=1)
    linears = [x for x in shard.linears if isinstance(x, DeviceLinear)]
    for buckets in EXACT_BUCKETS:
        shard.pad_to(buckets)
        # Attention's products have one number of rows in all buckets.
        rows = buckets[-1] * groups
        tiles = RowTiles(rows, rows)
        if not all(_invariant_in(linear, buckets) for linear in _by_shape(linears)):
            continue
        # A kernel for paths has neither masks nor tiles.
        tried = layers if shard.path_kernel is None else ()
        longest = (max_masked_k(layer, tiles, device) for layer in tried)
        settings = KernelSettings(min(longest, default=MAX_K), tiles, 1, buckets=buckets)
        if confirm(shard, settings) == "bitwise":
            return settings
    return KernelSettings(0, tiles, 1, row_invariant=False, buckets=buckets)


def _invariant_in(linear: DeviceLinear, buckets: Sequence[int]) -> bool:
    """Whether a row has the same bits in all places of passes of these numbers of rows."""
    row = noise(1, linear.in_features).to(linear.device, linear.dtype)
    products = (linear.product(row.expand(count, -1).contiguous()) for count in buckets)
    return _all_rows_equal(product.unsqueeze(0) for product in products)


def _by_shape(linears: Iterable[LinearT]) -> Iterable[LinearT]:
    # A matrix shared with the embedding (no bytes of its own) is multiplied unpacked.
    return {(x.in_features, x.out_features, x.weight_bytes): x for x in linears}.values()


# --- Linear layers.


def min_invariant_rows(linears: list[RowwiseLinear]) -> int | None:
    """Fewest rows from which on results do not depend on their number; None if there are none."""
    least = max(x.min_tested_rows for x in linears)
    equal = {rows for rows in _ROW_COUNTS if rows >= least}
    for linear in _by_shape(linears):
        width, height = linear.in_features, linear.out_features
        counts = _ROW_COUNTS if width * height <= _LARGE_WEIGHT else _FEW_ROW_COUNTS
        x = noise(max(counts), width).to(linear.dtype)
        want = linear.unrounded_product(x[:16])
        for rows in equal.intersection(counts):
            common = min(rows, 16)
            if not torch.equal(linear.unrounded_product(x[:rows])[:common], want[:common]):
                equal.discard(rows)
    return next((n for n in _MIN_ROWS if equal.issuperset(x for x in _ROW_COUNTS if x >= n)), None)


# --- Attention's products. They are torch's own, so MKL's or whatever this torch was built with, or
# numpy's.

_KNOWN_TILES = (
    RowTiles(),
    # MKL with AVX2 alone: tiles of six rows, and from some 60 rows on other kernels.
    RowTiles(6, 48),
    RowTiles(16),
    RowTiles(24, 48),
)

_TILE_MULTIPLES = 8
"""Multiples of a tile that are tried one by one."""

_MANY_ROWS = (72, 96, 128, 200, 256)
"""Row counts of which the next multiple of a tile is tried as well."""

_SLOT_COUNTS = (BLOCK, 3 * BLOCK)

_ONEDNN_STEP = 6
"""One in so many row counts is tried where oneDNN multiplies (bfloat16): it keeps half a MiB of
code for each shape, and computes any number of rows alike."""


def row_tiles_of(layers: Collection[LayerShape], dtype: torch.dtype) -> RowTiles | None:
    """Row counts for which a row's scores and its sums of values have the same bits wherever it is
    in the product, in all ``layers``, if there are any; a row of the pass is ``groups`` rows of
    attention."""

    def fit(tiles: RowTiles) -> bool:
        return all(
            _all_rows_equal(_scores(layer, dtype, counts)) and _all_rows_equal(_sums(layer, counts))
            for layer in layers
            for counts in [_row_counts(tiles, layer.groups)]
        )

    return next(filter(fit, _KNOWN_TILES), None)


def block_rows_of(layers: Collection[LayerShape], dtype: torch.dtype, max_k: int) -> int:
    """``KernelSettings.block_rows``: numpy's where its products of all even numbers of rows give a
    row the same bits, and chains of ``max_k`` terms ignore zeros."""
    # torch shares the attention of many rows among threads.
    if dtype != torch.float32 or torch.get_num_threads() > 1 or not layers:
        return 0
    max_rows = min(block_rows(layer.key_width, layer.value_width + ONES) for layer in layers)
    counts, tiles = range(2, max_rows + 1, 2), RowTiles(2, max_rows)
    for layer in layers:
        heads, columns = layer.kv_heads, layer.value_width + ONES
        for width, right in (
            (layer.key_width, noise(heads, BLOCK, layer.key_width, seed=1).mT),
            (BLOCK, noise(heads, BLOCK, columns, seed=1)),
        ):
            row = noise(heads, 1, width)
            if not _all_rows_equal(multiply(_repeated(row, n), right) for n in counts):
                return 0
        if max_masked_k(layer, tiles, add_product=add_by_numpy) < max_k:
            return 0
    return max_rows


AddProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A sum [heads, rows, n] and a product added to it."""


def add_by_numpy(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """As ``BlockAttention`` does."""
    return total + multiply(left, right)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """numpy's product."""
    return torch.from_numpy(left.numpy() @ right.numpy())


def max_masked_k(
    layer: LayerShape,
    tiles: RowTiles,
    device: Device = CPU,
    add_product: AddProduct = torch.baddbmm,
) -> int:
    """Largest inner dimension, up to ``MAX_K``, for which weights [kv_heads, rows, K] times values
    [kv_heads, K, V + ONES] depends neither on zeros between its terms nor on the number of
    rows."""
    longest = 0
    for length in range(BLOCK, MAX_K + 1, BLOCK):
        for count in (layer.groups, 5 * layer.groups, 16 * layer.groups):
            rows = tiles.padded(count)
            shape = (min(rows, tiles.max_rows or rows), length, tiles.multiple)
            if not _ignores_zeros(layer, *shape, device, add_product):
                return longest
        longest = length
    return longest


def _scores(layer: LayerShape, dtype: torch.dtype, counts: Sequence[int]) -> Iterator[Tensor]:
    """Scores of one query, repeated."""
    heads, width = layer.kv_heads, layer.key_width
    query = noise(heads, 1, width).to(dtype)
    keys = noise(heads, _SLOT_COUNTS[-1], width, seed=1).to(dtype)
    if scores_type(query) != torch.float32:
        counts = counts[::_ONEDNN_STEP]
    for rows in counts:
        for slots in _SLOT_COUNTS:
            products = CPU.scores(_repeated(query, rows), keys.narrow(1, 0, slots))
            yield products.narrow(2, 0, BLOCK)


def _sums(layer: LayerShape, counts: Sequence[int]) -> Iterator[Tensor]:
    """Sums of values with one row of weights, repeated."""
    heads, columns = layer.kv_heads, layer.value_width + ONES
    weights = noise(heads, 1, BLOCK).exp_()
    values = noise(heads, BLOCK, columns, seed=1)
    start = noise(heads, 1, columns, seed=2)
    for rows in counts:
        yield torch.baddbmm(_repeated(start, rows), _repeated(weights, rows), values)


def _row_counts(tiles: RowTiles, groups: int) -> list[int]:
    """Row counts that a pass may have, ascending."""
    padded = {tiles.padded(count * groups) for count in (1, 2, 5, 16)}
    each = {tiles.multiple * count for count in range(1, _TILE_MULTIPLES + 1)}
    many = {tiles.padded(count) for count in _MANY_ROWS}
    return sorted(n for n in padded | each | many if tiles.max_rows is None or n <= tiles.max_rows)


def _repeated(row: Tensor, rows: int) -> Tensor:
    return row.expand(-1, rows, -1).contiguous()


def _all_rows_equal(products: Iterable[Tensor]) -> bool:
    """Whether all rows of all products [heads, rows, n] are the same."""
    first: Tensor | None = None
    for product in products:
        first = product[:, :1] if first is None else first
        if not torch.equal(product, first.expand_as(product)):
            return False
    return True


def _ignores_zeros(
    layer: LayerShape, rows: int, length: int, few: int, device: Device, add_product: AddProduct
) -> bool:
    """Whether terms among zeros add up to what they do as a dense block of ``few`` rows."""
    heads, columns = layer.kv_heads, layer.value_width + ONES
    terms = BLOCK - 3
    weights = noise(heads, rows, terms).exp_()
    values = noise(heads, terms, columns, seed=1)
    # The same terms as a dense block for few rows, and spread among zeros for all rows.
    dense = weights.new_zeros(heads, few, BLOCK)
    dense[..., :terms] = weights[:, :few]
    dense_values = values.new_zeros(heads, BLOCK, columns)
    dense_values[:, :terms] = values
    generator = torch.Generator().manual_seed(length)
    places = torch.randperm(length, generator=generator)[:terms].sort().values
    spread = weights.new_zeros(heads, rows, length)
    spread[..., places] = weights
    spread_values = noise(heads, length, columns, seed=2)
    spread_values[:, places] = values
    start = noise(heads, rows, columns, seed=3)
    want, got = (
        add_product(*map(device.put, products))
        for products in (
            (start[:, :few].contiguous(), dense, dense_values),
            (start, spread, spread_values),
        )
    )
    return torch.equal(got[:, :few], want)


# --- The loaded stage: layers of every kind over a short path, row by row and inside a tree.

_TREE = ProbeTree(BLOCK - 3, siblings=(2, 1, 4, 3, 6, 2), levels=((0,), (1, 2), (3,), (4, 5)))


_WIDE_TREE = ProbeTree(BLOCK - 3, (2, 14, 4, 70, 6, 2), levels=_TREE.levels)
"""With passes of 3 to 71 rows: of an accelerator's several buckets, and in parts."""


def confirm(shard: Shard, settings: KernelSettings) -> Guarantee:
    """Compare the path's rows alone and in the tree."""
    if not settings.row_invariant:
        return "tolerance"
    probe = _WIDE_TREE if settings.buckets else _TREE
    with shard.truncated():
        alone = _path_outputs(shard, settings, probe.alone())
        in_tree = _path_outputs(shard, settings, probe.in_tree())
    return "bitwise" if torch.equal(alone, in_tree) else "tolerance"


def _path_outputs(shard: Shard, settings: KernelSettings, passes: Iterable[ProbePass]) -> Tensor:
    """Logits [n, vocab] of the path's rows on the last stage, hidden states [n, H] before it."""
    inputs = shard.probe_inputs(2 * len(_TREE.siblings))
    cache = _random_cache(shard)
    outputs = []
    for probe in passes:
        max_rows = settings.buckets[-1] if settings.buckets else len(probe.rows)
        results = [
            _rows_output(
                shard, settings, cache, probe, inputs[probe.inputs], slice(at, at + max_rows)
            )
            for at in range(0, len(probe.rows), max_rows)
        ]
        outputs.append(torch.cat(results)[probe.path_rows])
    return torch.cat(outputs)


def _rows_output(
    shard: Shard,
    settings: KernelSettings,
    cache: KVCache,
    probe: ProbePass,
    inputs: Tensor,
    part: slice,
) -> Tensor:
    """Output for some rows of a pass. Copied: the next ones overwrite it on an accelerator."""
    rows, device = probe.rows[part], shard.device
    tree = attention_of([(cache, probe.committed, rows)], settings)
    arguments = (inputs[part], tree.positions, tree)
    sampled = device.integers(range(len(rows)))
    return (
        shard.logits(*arguments, sampled) if shard.has_head else shard.hidden(*arguments)
    ).clone()


def _random_cache(shard: Shard) -> KVCache:
    """A cache with a committed path of noise: quicker than computing one."""
    shape, prefix = shard.cache_shape("exact"), _TREE.prefix
    device = shard.device
    capacity = prefix + len(_WIDE_TREE.siblings) + sum(_WIDE_TREE.siblings)
    cache = KVCache(shape, capacity, device)
    cache.reserve(prefix)
    for i, state in state_shapes(shape.layers).items():
        values = noise(state.heads, state.key_width, state.value_width, seed=2 * i)
        window = noise(state.kernel - 1, state.channels, seed=2 * i + 1)
        cache.states[i].begin(prefix, device.put(values), device.put(window))
    for i, layer in attention_shapes(shape.layers).items():
        keys = noise(layer.kv_heads, prefix, layer.key_width, seed=2 * i)
        values = noise(layer.kv_heads, prefix, layer.value_width, seed=2 * i + 1)
        cache.write(i, slice(0, prefix), device.put(keys), device.put(values))
    cache.positions[:prefix] = range(prefix)
    return cache
