"""Names of the beginnings of a text, by which its keys and values are stored on disk.

Each is a hash of whose text it is and of all tokens so far, so that a stage, which stores them,
needs no tokens, and another tenant's text has other names.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from asyncspec_protocol.limits import MAX_PREFIX_KEYS, PREFIX_KEY_BYTES, PREFIX_UNIT

_UNIT = struct.Struct(f"<{PREFIX_UNIT}I")


def prefix_keys(tokens: Sequence[int], tenant: str = "") -> tuple[bytes, ...]:
    """The names of the beginnings of ``PREFIX_UNIT``, twice as many, ... tokens."""
    key = blake2b(tenant.encode(), digest_size=PREFIX_KEY_BYTES).digest()
    keys: list[bytes] = []
    for start in range(0, len(tokens) - PREFIX_UNIT + 1, PREFIX_UNIT):
        unit = _UNIT.pack(*tokens[start : start + PREFIX_UNIT])
        key = blake2b(key + unit, digest_size=PREFIX_KEY_BYTES).digest()
        keys.append(key)
    return tuple(keys[:MAX_PREFIX_KEYS])
