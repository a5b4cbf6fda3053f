"""``llama_batch``: the rows of a pass as llama.cpp takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncspec.backend.llama.branches import Node

PADDING = 255
"""The sequence of rows that only fill a pass."""


class Batch:
    """``llama_batch`` over arrays that are filled anew for each pass."""

    def __init__(self, bound: Any, most: int, width: int) -> None:
        self.batch = bound.llama_batch()
        self._tokens = np.zeros(most, np.int32)
        self._hidden = np.zeros((most, width), np.float32)
        self._positions = np.zeros(most, np.int32)
        self._counts = np.zeros(most, np.int32)
        self._where = np.zeros(most, np.uint64)
        self._outputs = np.zeros(most, np.int8)
        self._sequences = np.zeros(0, np.int32)
        kinds = dict(bound.llama_batch._fields_)
        self.batch.pos = ctypes.cast(self._positions.ctypes.data, kinds["pos"])
        self.batch.n_seq_id = ctypes.cast(self._counts.ctypes.data, kinds["n_seq_id"])
        self.batch.seq_id = ctypes.cast(self._where.ctypes.data, kinds["seq_id"])
        self.batch.logits = ctypes.cast(self._outputs.ctypes.data, kinds["logits"])
        # Made once: a pointer to an array takes microseconds.
        self._by_token = ctypes.cast(self._tokens.ctypes.data, kinds["token"]), kinds["embd"]()
        self._by_state = kinds["token"](), ctypes.cast(self._hidden.ctypes.data, kinds["embd"])

    def fill(
        self,
        rows: Sequence[Node],
        members: dict[Node, list[int]],
        twins: int,
        padding: int,
        outputs: npt.NDArray[np.int8],
    ) -> None:
        """``rows``, and then ``padding`` rows of a sequence of their own."""
        count, total = len(rows), len(rows) + padding
        by_token = isinstance(rows[0].given, int)
        if by_token:
            self._tokens[:total] = [row.given for row in rows] + [0] * padding
        else:
            for i, row in enumerate(rows):
                self._hidden[i] = row.given
            self._hidden[count:total] = 1.0
        self._positions[:total] = [row.position for row in rows] + [*range(padding)]
        listed = [members[row] for row in rows]
        if twins == 2:
            listed = [[s for one in own for s in (2 * one, 2 * one + 1)] for own in listed]
        listed += [[PADDING]] * padding
        counts = [len(own) for own in listed]
        self._counts[:total] = counts
        self._sequences = np.array([s for own in listed for s in own], np.int32)
        starts = np.cumsum([0, *counts[:-1]], dtype=np.uint64)
        self._where[:total] = self._sequences.ctypes.data + 4 * starts
        self._outputs[:total] = outputs
        self.batch.n_tokens = total
        self.batch.token, self.batch.embd = self._by_token if by_token else self._by_state
