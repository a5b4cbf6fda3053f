"""Tried at start: what attention's matrix products do with few or many rows, and with zeros.

They are torch's own, so MKL's or whatever this torch was built with, on kernels that go by the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from asyncspec.backend.hf.cache import Shape
from asyncspec.backend.hf.noise import noise
from asyncspec.backend.hf.recipe import BLOCK, REACH, Strips
from asyncspec.backend.hf.widened import dots, scores_type

_KNOWN = (
    Strips(),
    # MKL with AVX2 alone: strips of six rows, and from some 60 rows on other kernels.
    Strips(6, 48),
    Strips(16),
    Strips(24, 48),
)

_EACH = 8
"""Multiples of a strip that are tried one by one."""

_MANY = (72, 96, 128, 200, 256)
"""Numbers of rows of which some multiple near by is tried as well."""

_SLOTS = (BLOCK, 3 * BLOCK)
"""In sight of the rows."""

_SPARSE = 6
"""Of so many numbers of rows one is tried where oneDNN multiplies (bfloat16): it keeps half a MiB
of code for each shape it has met, and goes through any number of rows alike."""


def strips_of(shape: Shape, groups: int) -> Strips | None:
    """Numbers of rows for which a row's scores and its sums of values have the same bits wherever
    it stands, if there are such; ``groups`` rows of attention stand for a row of the pass."""
    return next((strips for strips in _KNOWN if _alike(shape, groups, strips)), None)


def chain_reach(shape: Shape, groups: int, strips: Strips) -> int:
    """Longest product, up to ``REACH``, whose result is blind to zeros between its terms and to
    the number of rows: weights [kv_heads, rows, K] times values [kv_heads, K, value_width]."""
    reach = 0
    for length in range(BLOCK, REACH + 1, BLOCK):
        for rows in (groups, 5 * groups, 16 * groups):
            whole = strips.padded(rows)
            if not _blind(shape, min(whole, strips.most or whole), length, strips.multiple):
                return reach
        reach = length
    return reach


def _alike(shape: Shape, groups: int, strips: Strips) -> bool:
    numbers = sorted(_numbers(strips, groups))
    return _scores_alike(shape, numbers) and _sums_alike(shape, numbers)


def _scores_alike(shape: Shape, numbers: Sequence[int]) -> bool:
    heads, width = shape.kv_heads, shape.head_dim
    query = noise(heads, 1, width).to(shape.dtype)
    keys = noise(heads, _SLOTS[-1], width, seed=1).to(shape.dtype)
    if scores_type(query) != torch.float32:
        numbers = numbers[::_SPARSE]
    tried = (
        dots(_repeated(query, rows), keys.narrow(1, 0, slots)).narrow(2, 0, BLOCK)
        for rows in numbers
        for slots in _SLOTS
    )
    return _one_row(tried)


def _sums_alike(shape: Shape, numbers: Sequence[int]) -> bool:
    heads, columns = shape.kv_heads, shape.value_width
    weights = noise(heads, 1, BLOCK).exp_()
    values = noise(heads, BLOCK, columns, seed=1)
    start = noise(heads, 1, columns, seed=2)
    return _one_row(
        torch.baddbmm(_repeated(start, rows), _repeated(weights, rows), values) for rows in numbers
    )


def _numbers(strips: Strips, groups: int) -> set[int]:
    """Of rows, as a pass may have them."""
    own = {strips.padded(count * groups) for count in (1, 2, 5, 16)}
    each = {strips.multiple * count for count in range(1, _EACH + 1)}
    many = {strips.padded(count) for count in _MANY}
    return {n for n in own | each | many if strips.most is None or n <= strips.most}


def _repeated(row: torch.Tensor, rows: int) -> torch.Tensor:
    return row.expand(-1, rows, -1).contiguous()


def _one_row(products: Iterable[torch.Tensor]) -> bool:
    """Whether all rows of all of them [heads, rows, n] are the same."""
    first: torch.Tensor | None = None
    for product in products:
        first = product[:, :1] if first is None else first
        if not torch.equal(product, first.expand_as(product)):
            return False
    return True


def _blind(shape: Shape, rows: int, length: int, few: int) -> bool:
    """Whether terms among zeros add up to what they do as a block of ``few`` rows."""
    heads, columns = shape.kv_heads, shape.value_width
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
    want = torch.baddbmm(start[:, :few], dense, dense_values)
    got = torch.baddbmm(start, spread, spread_values)
    return torch.equal(got[:, :few], want)
