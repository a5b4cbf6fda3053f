"""Packed hidden states: every bit comes back, and what nobody has packed is refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from asyncspec.backend.row_compression import HEAD, PACKED, WINDOW, pack, packing_seconds, unpack
from asyncspec.core.cost_model.bandwidth import should_pack
from asyncspec.core.tensors import WireTensor
from asyncspec_protocol.base import TensorSpec

Values = npt.NDArray[np.uint16]

SHAPES = npst.array_shapes(min_dims=2, max_dims=3, max_side=40)
NEAR = st.integers(0x3F00, 0x3F80).map(lambda u: u ^ 0x8000 * (u % 2))
"""Bits of values that are near 1/2, of either sign."""


def wire(values: Values) -> WireTensor:
    return WireTensor("bfloat16", values.shape, values.view(np.uint8).reshape(-1).data)


def normal(rows: int, width: int, scale: float | npt.NDArray[np.float64] = 1.0) -> Values:
    values = np.random.default_rng(0).standard_normal((rows, width), np.float32) * scale
    return np.asarray(values, np.float32).view(np.uint32).__rshift__(16).astype(np.uint16)


@given(
    npst.arrays(np.uint16, SHAPES)
    | npst.arrays(np.uint16, SHAPES, elements=NEAR)
    | npst.arrays(np.uint16, SHAPES, elements=NEAR, fill=st.sampled_from([0, 0x8000, 1]))
)
def test_packing_is_lossless(values: Values) -> None:
    packed = pack(wire(values))
    back = unpack(packed) if packed.dtype == PACKED else packed
    assert back.dtype == "bfloat16"
    assert back.shape == values.shape
    assert bytes(back.data) == values.tobytes()
    assert packed.shape[:-1] == values.shape[:-1]
    assert packed.data.nbytes == TensorSpec(packed.dtype, packed.shape).nbytes <= values.nbytes


SPECIAL = st.sampled_from([0, 0x8000, 1, 0x807F, 0x0080, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF])
"""Zeros, denormals, the least normal value, infinities, NaNs."""


@given(
    st.integers(1, 3),
    st.integers(200, 301),
    st.dictionaries(st.integers(0, 199), SPECIAL | st.integers(0, 0xFFFF), max_size=40),
)
def test_rare_values_do_not_prevent_packing(rows: int, width: int, odd: dict[int, int]) -> None:
    """So few are no reason to leave a tensor plain, whatever its width."""
    values = normal(rows, width)
    for place, bits in odd.items():
        values[place % rows, place] = bits
    packed = pack(wire(values))
    assert packed.dtype == PACKED
    assert bytes(unpack(packed).data) == values.tobytes()


def test_all_bfloat16_values_are_packed() -> None:
    """Each of the 65,536 values, between others that lie close together."""
    values = normal(256, 1024)
    values[:, ::4] = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    packed = pack(wire(values))
    assert packed.dtype == PACKED
    assert bytes(unpack(packed).data) == values.tobytes()


@pytest.mark.parametrize("shape", [(16, 4096), (7, 4093), (1, 4096)])
@pytest.mark.parametrize("share", [0.0, 0.003, 0.03, 0.08, 0.15, 0.3])
def test_however_many_lie_outside_a_window(shape: tuple[int, int], share: float) -> None:
    """A share of the values is a hundred times as large, and of these one a million times."""
    rng = np.random.default_rng(2)
    other = rng.random(shape) < share
    powers = np.where(other, np.where(rng.random(shape) < share, 1e8, 1e2), 1)
    values = normal(*shape, powers)
    packed = pack(wire(values))
    assert packed.dtype == PACKED
    assert bytes(unpack(packed).data) == values.tobytes()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_hidden_states_take_seven_tenths(scale: float) -> None:
    values = normal(16, 4096, scale)
    assert pack(wire(values)).data.nbytes < 0.7 * values.nbytes


def test_channels_may_differ_a_hundredfold() -> None:
    scales = 10 ** np.random.default_rng(1).uniform(0, 2, 4096)
    values = normal(16, 4096, scales)
    assert pack(wire(values)).data.nbytes < 0.73 * values.nbytes


def of_exponents(*exponents: int) -> Values:
    """Eight values for each, in one row."""
    return np.array([[e << 7 | 0x55 for e in exponents] * 8], np.uint16)


def test_a_window_at_either_end_of_the_exponents() -> None:
    for exponents in (range(WINDOW), range(256 - WINDOW, 256)):
        values = of_exponents(*exponents)
        packed = pack(wire(values))
        assert packed.dtype == PACKED
        assert packed.data.nbytes == HEAD + values.size + 3 * values.size // 8
        assert bytes(unpack(packed).data) == values.tobytes()


@pytest.mark.parametrize("below", range(WINDOW + 1))
def test_the_second_window_lies_around_the_first(below: int) -> None:
    """Nothing is left over where the exponents are neighbours, wherever most of them lie."""
    often = range(100, 100 + WINDOW)
    values = of_exponents(*often, *often, *range(100 - below, 100 + 2 * WINDOW - below))
    packed = pack(wire(values))
    codes = values.size + values.size // 4  # a quarter lies outside the first window
    assert packed.data.nbytes == HEAD + values.size + 3 * codes // 8
    assert bytes(unpack(packed).data) == values.tobytes()


HEADS = st.tuples(st.integers(0, 40), st.integers(0, 255), st.integers(0, 255))


@given(npst.arrays(np.uint8, npst.array_shapes(min_dims=2, max_dims=2, max_side=50)), HEADS)
def test_bytes_that_pack_never_writes_are_refused(
    data: npt.NDArray[np.uint8], head: tuple[int, int, int]
) -> None:
    """Or it is a tensor of just so many values: the peer's fault is found at the width, then."""
    width, *windows = head
    flat = data.reshape(-1)
    flat[:HEAD] = [width, 0, 0, 0, *windows][: flat.size]
    refused_or_whole(data)


@given(st.data())
def test_packed_rows_that_were_changed_on_their_way(data: st.DataObject) -> None:
    values = normal(3, 200)
    packed = pack(wire(values))
    rows = np.frombuffer(packed.data, np.uint8).reshape(packed.shape).copy()
    for _ in range(data.draw(st.integers(1, 3))):
        rows.reshape(-1)[data.draw(st.integers(0, rows.size - 1))] = data.draw(st.integers(0, 255))
    refused_or_whole(rows)


@pytest.mark.parametrize("more", [-290, -200, -50, -2, -1, 1, 2])
def test_rows_that_are_too_short_or_too_long(more: int) -> None:
    packed = pack(wire(normal(3, 200)))
    rows, total = packed.shape
    data = (bytes(packed.data) + bytes(6))[: rows * (total + more)]
    with pytest.raises(ValueError, match="packed rows"):
        unpack(WireTensor(PACKED, (rows, total + more), memoryview(data)))


def test_a_shape_of_other_bytes() -> None:
    packed = pack(wire(normal(3, 200)))
    rows, total = packed.shape
    for shape in ((rows, total + 1), (rows, total - 1), (rows + 1, total), (rows - 1, total)):
        with pytest.raises(ValueError, match="packed rows"):
            unpack(WireTensor(PACKED, shape, packed.data))


def test_bytes_behind_the_last_exponent() -> None:
    packed = pack(wire(of_exponents(*range(100, 110)).reshape(2, -1)))
    data = bytearray(packed.data)
    assert data[-1] == 0  # it makes the rows equally long
    data[-1] = 1
    with pytest.raises(ValueError, match="more than their exponents"):
        unpack(WireTensor(PACKED, packed.shape, memoryview(data)))


@pytest.mark.parametrize("byte", [0, 0x55, 0xFF])
@pytest.mark.parametrize("width", [1000, 2000, 1 << 31, (1 << 32) - 1])
def test_a_width_is_believed_only_with_as_many_bytes(width: int, byte: int) -> None:
    rows = np.full((100, 1750), byte, np.uint8)
    rows.reshape(-1)[:4] = np.array([width], "<u4").view(np.uint8)
    assert most_memory(rows) < 6 * rows.nbytes


def every_value_outside_the_first_window(
    width: int, *, and_the_second: bool
) -> npt.NDArray[np.uint8]:
    """One packed row."""
    plane = bytes([0xFF] * (3 * width // 8))
    rest = plane + bytes(width) if and_the_second else bytes(len(plane))
    data = width.to_bytes(4, "little") + bytes([10, 100]) + bytes(width) + plane + rest
    return np.frombuffer(data, np.uint8).reshape(1, -1)


def test_the_most_memory_that_bytes_can_ask_for() -> None:
    row = every_value_outside_the_first_window(80_000, and_the_second=False)
    assert most_memory(row) < 6 * row.nbytes
    unpack(WireTensor(PACKED, row.shape, row.reshape(-1).data))


def test_rows_that_are_no_shorter_are_not_packed() -> None:
    row = every_value_outside_the_first_window(80, and_the_second=True)
    with pytest.raises(ValueError, match="packed rows of"):
        unpack(WireTensor(PACKED, row.shape, row.reshape(-1).data))


def most_memory(rows: npt.NDArray[np.uint8]) -> int:
    """Bytes that unpacking them takes at any time."""
    tracemalloc.start()
    try:
        refused_or_whole(rows)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refused_or_whole(rows: npt.NDArray[np.uint8]) -> None:
    """What unpacking makes of any bytes."""
    try:
        found = unpack(WireTensor(PACKED, rows.shape, rows.reshape(-1).data))
    except ValueError:
        return
    assert found.data.nbytes == TensorSpec("bfloat16", found.shape).nbytes < 2 * rows.nbytes
    assert found.shape[0] == rows.shape[0]


def test_what_is_not_bfloat16_stays_as_it_is() -> None:
    plain = WireTensor("float32", (2, 3), memoryview(bytes(24)))
    assert pack(plain) is plain
    assert unpack(plain) is plain


def test_packing_costs_time_and_less_than_a_slow_line_saves() -> None:
    cost = packing_seconds()
    assert cost > 0
    # A line of 10 Mbit/s takes 800 ns a byte.
    assert should_pack(False, 8e-7, cost)
