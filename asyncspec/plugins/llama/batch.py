"""``llama_batch``: the rows of a pass as llama.cpp takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncspec.plugins.llama.branches import Node

PADDING = 255
"""The sequence of rows that only fill a pass."""


class Batch:
    """``llama_batch`` over arrays that are filled anew for each pass: number by number, as behind a
    pass no cache holds the code of an assignment to an array."""

    def __init__(self, bound: Any, max_rows: int, width: int, axes: int = 1) -> None:
        """``axes``: positions of a row that is given by its hidden state."""
        self._axes = axes
        self.batch = bound.llama_batch()
        self._hidden = np.zeros((max_rows, width), np.float32)
        self._tokens = (ctypes.c_int32 * max_rows)()
        self._positions = (ctypes.c_int32 * (max_rows * axes))()
        self._counts = (ctypes.c_int32 * max_rows)()
        self._where = (ctypes.c_uint64 * max_rows)()
        self._outputs = (ctypes.c_int8 * max_rows)()
        # A row is in no sequence twice.
        self._sequences = (ctypes.c_int32 * (max_rows * (PADDING + 1)))()
        self._address = ctypes.addressof(self._sequences)
        kinds = dict(bound.llama_batch._fields_)
        self.batch.pos = ctypes.cast(self._positions, kinds["pos"])
        self.batch.n_seq_id = ctypes.cast(self._counts, kinds["n_seq_id"])
        self.batch.seq_id = ctypes.cast(self._where, kinds["seq_id"])
        self.batch.logits = ctypes.cast(self._outputs, kinds["logits"])
        # Made once: a pointer to an array takes microseconds.
        self._by_token = ctypes.cast(self._tokens, kinds["token"]), kinds["embd"]()
        self._by_state = kinds["token"](), ctypes.cast(self._hidden.ctypes.data, kinds["embd"])

    def fill(
        self,
        rows: Sequence[Node],
        members: dict[Node, list[int]],
        twins: int,
        padding: int,
        outputs: Sequence[bool],
    ) -> None:
        """``rows``, and then ``padding`` rows of a sequence of their own."""
        count, total = len(rows), len(rows) + padding
        by_token = isinstance(rows[0].input, int)
        inputs: Any = self._tokens if by_token else self._hidden
        for i, row in enumerate(rows):
            inputs[i] = row.input
            self._positions[i] = row.position
        for i in range(padding):
            inputs[count + i] = 0 if by_token else 1.0
            self._positions[count + i] = i
        # A multimodal RoPE has the last one of text 0, and the others equal.
        for axis in range(1, self._axes):
            for i in range(total):
                position = self._positions[i] if axis < self._axes - 1 else 0
                self._positions[axis * total + i] = position
        end = 0
        for i in range(total):
            sequences = members[rows[i]] if i < count else [PADDING]
            if twins == 2 and i < count:
                sequences = [s for one in sequences for s in (2 * one, 2 * one + 1)]
            self._where[i] = self._address + 4 * end
            self._counts[i] = len(sequences)
            for sequence in sequences:
                self._sequences[end] = sequence
                end += 1
            self._outputs[i] = outputs[i]
        self.batch.n_tokens = total
        self.batch.token, self.batch.embd = self._by_token if by_token else self._by_state
