"""bfloat16 values in seven tenths of their bytes, to the last bit, for slow links.

The exponents of a tensor of hidden states lie close together: seven neighbouring ones cover all
but two or three values in a hundred, and seven more all but a few in a thousand. So a value travels
as a byte (its fraction's seven bits and its sign) and three bits that say which of the first seven
exponents it has, or that it has another. Those others follow in the same way, in three bits each,
and what is left over in a byte each. Pure.

N values of rows of W are [W (4 bytes), the lowest exponent of either window (2), N bytes, codes of
all values, codes of those outside the first window, exponents of those outside both (a byte each),
zeros up to a whole number of bytes a row]. The codes of n values are three planes of n bits, each
filled up to a whole byte. What lies above a window moves down by its seven places for what comes
after it, so that the second one may lie around the first.
"""

from __future__ import annotations

import math
import timeit

import numpy as np
import numpy.typing as npt

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.tensors import WireTensor

PACKED = "bfloat16-packed-2"
"""The dtype such a tensor has on the wire; its items are bytes."""

WINDOWS = 2  # of neighbouring exponents; docs/notebook.md compares others
BITS = 3  # of a code
WINDOW = 2**BITS - 1
"""Neighbouring exponents with a code of their own: 0 to 6. Code 7 is any other."""

HEAD = 4 + WINDOWS  # bytes: the width, and each window's lowest exponent
SAMPLE = 2048
"""Values, about, that are looked at to choose the windows: a bad choice costs bytes alone."""

SAMPLE_ROWS, SAMPLE_WIDTH = 8, 4096
"""Shape of the timed sample: a short segment of a 7B model. The more rows, the less a byte costs;
one row has some four times this cost, and 64 rows half of it."""

PLANES = (1 << np.arange(BITS, dtype=np.uint8))[:, None]

Bytes = npt.NDArray[np.uint8]
Marks = npt.NDArray[np.bool_]


def pack(wire: WireTensor) -> WireTensor:
    """bfloat16 values [..., W] as bytes [..., B], B about 11 W / 8; as they are if no shorter."""
    if wire.dtype != "bfloat16":
        return wire
    width = wire.shape[-1]
    values = np.frombuffer(wire.data, "<u2")
    turned = values + values
    turned |= values >> 15
    low = turned.astype(np.uint8)
    turned >>= 8
    exponents = turned.astype(np.uint8)
    windows = _windows(exponents)
    parts = [np.array([width], "<u4").view(np.uint8), np.array(windows, np.uint8), low]
    for lowest in windows:
        codes, exponents = _split(exponents, lowest)
        parts.append(codes)
    parts.append(exponents)
    size, rows = sum(map(len, parts)), values.size // width
    total = -(-size // rows)
    if total >= 2 * width:
        return wire
    parts.append(np.zeros(rows * total - size, np.uint8))
    return WireTensor(PACKED, (*wire.shape[:-1], total), np.concatenate(parts).data)


def unpack(wire: WireTensor) -> WireTensor:
    """What ``pack`` was given. Raises ``ValueError`` for bytes it does not make. Whatever they say,
    no array takes more than three times their number."""
    if wire.dtype != PACKED:
        return wire
    data = np.frombuffer(wire.data, np.uint8)
    *outer, total = wire.shape
    rows = math.prod(outer)
    width = int(data[:4].view("<u4")[0]) if data.size > HEAD else 0
    count = rows * width
    if data.size != rows * total or not count or total >= 2 * width:
        raise ValueError(f"packed rows of {total} bytes")
    windows = tuple(map(int, data[4:HEAD]))
    low = _take(data, HEAD, count)
    exponents, end = _join(data, HEAD + count, count, windows)
    if data.size - end >= rows or data[end:].any():
        raise ValueError("packed rows with more than their exponents")
    turned = exponents.astype(np.uint16)
    turned *= 256
    turned |= low
    values = turned >> 1
    turned *= 1 << 15
    values |= turned
    data = values.astype("<u2", copy=False).view(np.uint8)
    return WireTensor("bfloat16", (*outer, width), data.data)


def _windows(exponents: Bytes) -> list[int]:
    """The lowest exponent of each window: it holds most of what those before it leave. An odd step
    meets every channel of rows that are a power of two long."""
    counts = np.bincount(exponents[:: exponents.size // SAMPLE | 1], minlength=256)
    windows = []
    for _ in range(WINDOWS):
        lowest = int(np.convolve(counts, np.ones(WINDOW, counts.dtype), "valid").argmax())
        windows.append(lowest)
        counts = np.concatenate((counts[:lowest], counts[lowest + WINDOW :]))
    return windows


def _split(exponents: Bytes, lowest: int) -> tuple[Bytes, Bytes]:
    """The codes of exponents, as planes of bits, and those that have none, moved together."""
    codes = exponents - np.uint8(lowest)
    outside = codes >= WINDOW  # what lies below the window wraps
    codes |= outside.view(np.uint8) * np.uint8(WINDOW)
    rest = exponents[_places(outside, int(np.count_nonzero(outside)))]
    rest -= (rest > lowest).view(np.uint8) * np.uint8(WINDOW)
    return np.packbits(codes & PLANES, axis=1).reshape(-1), rest


def _join(data: Bytes, start: int, count: int, windows: tuple[int, ...]) -> tuple[Bytes, int]:
    """``count`` exponents that lie in packed bytes from ``start`` on, and where they end."""
    if not windows:
        return _take(data, start, count).copy(), start + count
    lowest, *others = windows
    length = -(-count // 8)
    planes = _take(data, start, BITS * length).reshape(BITS, length)
    *lower, codes = np.unpackbits(planes, axis=1, count=count)
    for plane in reversed(lower):
        codes += codes
        codes |= plane
    outside = codes == WINDOW
    missing = int(np.count_nonzero(outside))
    rest, end = _join(data, start + BITS * length, missing, tuple(others))
    rest += (rest >= lowest).view(np.uint8) * np.uint8(WINDOW)
    codes += np.uint8(lowest)
    codes[_places(outside, missing)] = rest
    return codes, end


def _places(marks: Marks, many: int) -> Marks | npt.NDArray[np.intp]:
    """Indices of ``many`` marked values, or the marks where eight bytes for each are too many."""
    return marks if 4 * many > marks.size else np.flatnonzero(marks)


def _take(data: Bytes, start: int, count: int) -> Bytes:
    """So many bytes. Raises ``ValueError`` where there are fewer."""
    if start + count > len(data):
        raise ValueError("packed rows without all their exponents")
    return data[start : start + count]


def packing_seconds() -> float:
    """Seconds for each byte of a plain tensor to be packed and unpacked: the quickest of some
    samples (5 ms in all), as other work makes them slower. Channels differ by up to ten times,
    since values outside the first window take time."""
    rng = np.random.default_rng(0)
    scales = 10 ** rng.random(SAMPLE_WIDTH)
    values = (rng.standard_normal((SAMPLE_ROWS, SAMPLE_WIDTH)) * scales).astype(np.float32)
    data = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8).reshape(-1).data
    plain = WireTensor("bfloat16", (SAMPLE_ROWS, SAMPLE_WIDTH), data)
    taken = timeit.repeat(lambda: unpack(pack(plain)), number=1, repeat=PARAMETERS.packing_trials)
    return min(taken) / plain.data.nbytes
