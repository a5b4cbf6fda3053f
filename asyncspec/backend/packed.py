"""bfloat16 values in three quarters of their bytes, to the last bit, for lines that are slow.

The exponents of a tensor of hidden states lie close together: fourteen neighbouring ones and zero
cover all but a few values in ten thousand. So a value travels as a byte (its sign and its
fraction's seven bits) and half a byte that says which of those exponents it has, or that it has
another one, which then follows at the end of its row. Pure.

Each row of W values is [the lowest of the fourteen exponents (1 byte), room E for other exponents
(2), W bytes, W / 2 bytes of codes, other exponents in order (E)]; E is what the neediest row takes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from asyncspec.backend.base import WireTensor

PACKED = "bfloat16-packed"
"""The dtype such a tensor has on the wire; its items are bytes."""

WINDOW = 14
"""Neighbouring exponents with a code of their own: 1 to 14. Code 0 is exponent 0."""

OTHER = 15
HEAD = 3

Bytes = npt.NDArray[np.uint8]


def pack(wire: WireTensor) -> WireTensor:
    """bfloat16 values [..., W] as bytes [..., 3 + 3 W / 2 + E]; what is something else, or would be
    no shorter, as it is."""
    width = wire.shape[-1]
    if wire.dtype != "bfloat16" or width % 2:
        return wire
    values = np.frombuffer(wire.data, "<u2").reshape(-1, width)
    exponents = ((values >> 7) & 0xFF).astype(np.uint8)
    lowest = _window(exponents)
    # Exponents below the window wrap, so that one comparison finds those on either side.
    codes = exponents - np.uint8(lowest - 1)
    other = (codes - np.uint8(1) >= WINDOW) & (exponents != 0)
    codes[exponents == 0] = 0
    codes[other] = OTHER
    counts = other.sum(1)
    room = int(counts.max())
    total = HEAD + width + width // 2 + room
    if total >= 2 * width or room > 0xFFFF:
        return wire
    out = np.zeros((len(values), total), np.uint8)
    head, low, pairs, rest = _parts(out, width)
    head[:] = lowest, room & 0xFF, room >> 8
    low[:] = ((values >> 8) & 0x80) | (values & 0x7F)
    pairs[:] = codes[:, ::2] | (codes[:, 1::2] << 4)
    rest[np.arange(room) < counts[:, None]] = exponents[other]
    return WireTensor(PACKED, (*wire.shape[:-1], total), out.reshape(-1).data)


def unpack(wire: WireTensor) -> WireTensor:
    """What ``pack`` was given. Raises ``ValueError`` for bytes it does not make."""
    if wire.dtype != PACKED:
        return wire
    total = wire.shape[-1]
    data = np.frombuffer(wire.data, np.uint8).reshape(-1, total)
    packed = total - HEAD - (int(data[0, 1]) | int(data[0, 2]) << 8) if total > HEAD else 0
    if packed < 3 or packed % 3:
        raise ValueError(f"packed rows of {total} bytes")
    head, low, pairs, rest = _parts(data, 2 * packed // 3)
    codes = np.empty(low.shape, np.uint8)
    codes[:, ::2] = pairs & 0x0F
    codes[:, 1::2] = pairs >> 4
    other = codes == OTHER
    exponents = codes + (head[:, :1] - np.uint8(1))
    exponents[codes == 0] = 0
    given = rest[np.arange(rest.shape[1]) < other.sum(1)[:, None]]
    if len(given) != np.count_nonzero(other):
        raise ValueError("packed rows without their other exponents")
    exponents[other] = given
    sign, fraction = low.astype(np.uint16) & 0x80, low & 0x7F
    values = (sign << 8) | (exponents.astype(np.uint16) << 7) | fraction
    shape = (*wire.shape[:-1], values.shape[1])
    return WireTensor("bfloat16", shape, values.astype("<u2").view(np.uint8).reshape(-1).data)


def _window(exponents: Bytes) -> int:
    """The lowest of those neighbouring exponents, 0 left out, that most values have."""
    below = np.cumsum(np.bincount(exponents.reshape(-1), minlength=256))
    return int(np.argmax(below[WINDOW:] - below[:-WINDOW])) + 1


def _parts(rows: Bytes, width: int) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Views of packed rows: head, low bytes, pairs of codes, other exponents."""
    low, pairs = HEAD + width, HEAD + width + width // 2
    return rows[:, :HEAD], rows[:, HEAD:low], rows[:, low:pairs], rows[:, pairs:]
