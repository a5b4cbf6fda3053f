"""Files of a draft node's disk cache: the target's features of prompts and answers.

Stages store keys and values; an EAGLE head also has to be fed what the target computed for every
token it has read. So a draft node whose token source reads features stores these, by the same names
as its stages and in files of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from msgspec import Struct

from asyncspec.backend.prefix_files import PrefixFiles
from asyncspec.core.feature_log import rows_between
from asyncspec.core.jobs import TensorRows
from asyncspec.core.prefix_keys import PART
from asyncspec.core.tensors import Tensors, WireTensor

Parts = Sequence[tuple[int, int, Sequence[memoryview]]]


class _Shape(Struct, frozen=True, array_like=True):
    """The first buffer of a part; the second one has the bytes."""

    dtype: str
    shape: tuple[int, ...]


class FeatureFiles(PrefixFiles):
    """A ``PrefixStore`` whose arrays are rows of features (``TensorRows``) from position 0 on."""

    def __init__(self, folder: Path, max_bytes: int, tensors: Tensors) -> None:
        """As of ``PrefixFiles``."""
        super().__init__(folder, max_bytes)
        self._tensors = tensors

    def read(self, keys: Sequence[bytes]) -> tuple[int, object]:
        """See ``PrefixStore``; the rows are of one tensor."""
        tokens, parts = super().read(keys)
        try:
            rows = TensorRows(self._unpacked(cast("Parts", parts)), tuple(range(tokens)))
        except (ValueError, msgspec.DecodeError):
            return 0, ()  # the target is computed again, which is right in any case
        return tokens, (rows,)

    def write(self, keys: Sequence[bytes], start: int, end: int, arrays: object) -> int:
        """See ``PrefixStore``. What is there already is not written again."""
        features = cast("Sequence[TensorRows]", arrays)
        reached = super().write(keys, 0, 0, ())
        while 0 <= reached < end:
            part = min((reached // PART + 1) * PART, end)
            buffers = list(self._packed(rows_between(features, reached, part)))
            last, reached = reached, super().write(keys, reached, part, buffers)
            if reached <= last:
                break  # there is no room
        return reached

    def _packed(self, rows: Sequence[TensorRows]) -> Iterator[object]:
        """The buffers of a part."""
        wires = [self._tensors.pack(some) for some in rows]
        width = wires[0].shape[1:]
        shape = _Shape(wires[0].dtype, (sum(wire.shape[0] for wire in wires), *width))
        yield np.frombuffer(msgspec.msgpack.encode(shape), np.uint8)
        yield np.frombuffer(b"".join(wire.data for wire in wires), np.uint8)

    def _unpacked(self, parts: Parts) -> object:
        """The handle of all rows. Raises ``ValueError`` where parts do not fit together."""
        shapes = [msgspec.msgpack.decode(bytes(first), type=_Shape) for *_, (first, _) in parts]
        kinds = {(part.dtype, part.shape[1:]) for part in shapes}
        if len(kinds) != 1:
            raise ValueError("features of several kinds, or none")
        ((dtype, width),) = kinds
        rows = sum(part.shape[0] for part in shapes)
        content = bytearray().join(data for *_, (_, data) in parts)
        return self._tensors.unpack(WireTensor(dtype, (rows, *width), memoryview(content)))
