"""Packed hidden states: every bit comes back, and what nobody has packed is refused."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from asyncspec.actor.gauge import packs
from asyncspec.backend.base import WireTensor
from asyncspec.backend.packed import PACKED, WINDOW, pack, unpack
from asyncspec.backend.packing_cost import packing_seconds
from asyncspec_protocol.codec import TensorSpec

Values = npt.NDArray[np.uint16]

SHAPES = npst.array_shapes(min_dims=2, max_dims=3, max_side=40)
NEAR = st.integers(0x3F00, 0x3F80).map(lambda u: u ^ 0x8000 * (u % 2))
"""Bits of values that are near 1/2, of either sign."""


def wire(values: Values) -> WireTensor:
    return WireTensor("bfloat16", values.shape, values.view(np.uint8).reshape(-1).data)


def normal(rows: int, width: int, scale: float = 1.0) -> Values:
    values = np.random.default_rng(0).standard_normal((rows, width), np.float32) * scale
    return np.asarray(values, np.float32).view(np.uint32).__rshift__(16).astype(np.uint16)


@given(
    npst.arrays(np.uint16, SHAPES)
    | npst.arrays(np.uint16, SHAPES, elements=NEAR)
    | npst.arrays(np.uint16, SHAPES, elements=NEAR, fill=st.sampled_from([0, 0x8000, 1]))
)
def test_every_bit_comes_back(values: Values) -> None:
    packed = pack(wire(values))
    back = unpack(packed) if packed.dtype == PACKED else packed
    assert back.dtype == "bfloat16"
    assert back.shape == values.shape
    assert bytes(back.data) == values.tobytes()
    assert packed.shape[:-1] == values.shape[:-1]
    assert packed.data.nbytes == TensorSpec(packed.dtype, packed.shape).nbytes <= values.nbytes


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_hidden_states_take_three_quarters(scale: float) -> None:
    values = normal(16, 4096, scale)
    assert pack(wire(values)).data.nbytes < 0.755 * values.nbytes


def test_a_window_at_either_end_of_the_exponents() -> None:
    for exponents in (range(WINDOW + 1), range(256 - WINDOW, 256)):
        values = np.array([[e << 7 | 0x55 for e in exponents] * 20], np.uint16)
        packed = pack(wire(values))
        assert packed.dtype == PACKED
        assert packed.data.nbytes == 3 + 3 * values.size // 2
        assert bytes(unpack(packed).data) == values.tobytes()


ROOMS = st.sampled_from([(0, 0), (1, 0), (5, 0), (255, 255)])


@given(npst.arrays(np.uint8, npst.array_shapes(min_dims=2, max_dims=2, max_side=30)), ROOMS)
def test_what_nobody_has_packed_is_refused(
    data: npt.NDArray[np.uint8], room: tuple[int, int]
) -> None:
    """Or it is a tensor of just so many values: the peer's fault is found at the width, then."""
    data[:, 1:3] = room[: max(0, data.shape[1] - 1)]
    try:
        found = unpack(WireTensor(PACKED, data.shape, data.reshape(-1).data))
    except ValueError:
        return
    assert found.data.nbytes == TensorSpec("bfloat16", found.shape).nbytes
    assert found.shape[0] == data.shape[0]


def test_what_is_not_bfloat16_stays_as_it_is() -> None:
    plain = WireTensor("float32", (2, 3), memoryview(bytes(24)))
    assert pack(plain) is plain
    assert unpack(plain) is plain


def test_packing_costs_time_and_less_than_a_slow_line_saves() -> None:
    cost = packing_seconds()
    assert cost > 0
    # A line of 10 Mbit/s takes 800 ns a byte.
    assert packs(False, 8e-7, cost)
