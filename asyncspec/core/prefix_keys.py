"""Names of the beginnings of a text, by which its keys and values are stored on disk.

Each is a hash of all tokens so far, so that a stage, which stores them, needs no tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from asyncspec_protocol.limits import MAX_PREFIX_KEYS, PREFIX_KEY_BYTES, PREFIX_UNIT

PART = 256
"""Tokens of a stored part at most: some megabytes of keys and values, which delay a pass by
milliseconds. Only a text that has all tokens of a part can begin with it."""

_UNIT = struct.Struct(f"<{PREFIX_UNIT}I")


def prefix_keys(tokens: Sequence[int], features: Sequence[int] = ()) -> tuple[bytes, ...]:
    """The names of the beginnings of ``PREFIX_UNIT``, twice as many, ... tokens; of the target's
    features of these depths, where there are any."""
    key = blake2b(bytes(str([*features]), "ascii"), digest_size=PREFIX_KEY_BYTES).digest()
    keys: list[bytes] = []
    for start in range(0, len(tokens) - PREFIX_UNIT + 1, PREFIX_UNIT):
        unit = _UNIT.pack(*tokens[start : start + PREFIX_UNIT])
        key = blake2b(key + unit, digest_size=PREFIX_KEY_BYTES).digest()
        keys.append(key)
    return tuple(keys[:MAX_PREFIX_KEYS])
