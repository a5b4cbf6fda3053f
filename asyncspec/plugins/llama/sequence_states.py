"""What llama.cpp's cache holds of a sequence, outside it.

With sliding windows llama.cpp leaves out the cells that rows after a sequence's last one do not
see, but a session may begin like any part of a kept prompt. So such a sequence is copied window by
window, each of them at first alone in a sequence that is empty between passes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncspec.plugins.llama.batch import PADDING

Saved = Sequence[npt.NDArray[np.uint8]]
"""Copies of successive positions."""


def pointer(state: npt.NDArray[np.uint8]) -> Any:
    """An array as llama.cpp takes it."""
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def read_states(bound: Any, context: Any, sequence: int, window: int) -> Saved:
    """Copies of what is in a sequence, in order. ``window``: rows of one copy at most; 0: all."""
    memory = bound.llama_get_memory(context)
    if not window:
        return [_read(bound, context, sequence)]
    start = bound.llama_memory_seq_pos_min(memory, sequence)
    end = bound.llama_memory_seq_pos_max(memory, sequence) + 1
    # Windows of some models begin at multiples of their length.
    borders = [start, *range((start // window + 1) * window, end, window), end]
    states = []
    for first, last in pairwise(borders):
        bound.llama_memory_seq_cp(memory, sequence, PADDING, first, last)
        states.append(_read(bound, context, PADDING))
        bound.llama_memory_seq_rm(memory, PADDING, -1, -1)
    return states


def _read(bound: Any, context: Any, sequence: int) -> npt.NDArray[np.uint8]:
    state = np.empty(bound.llama_state_seq_get_size(context, sequence), np.uint8)
    bound.llama_state_seq_get_data(context, pointer(state), state.size, sequence)
    return state


def write_state(
    bound: Any, context: Any, state: npt.NDArray[np.uint8], sequences: Sequence[int]
) -> bool:
    """Put such a copy into an empty sequence, or into several behind what they hold. Whether there
    were as many free cells in a row."""
    goal = sequences[0] if len(sequences) == 1 else PADDING
    if not bound.llama_state_seq_set_data(context, pointer(state), state.size, goal):
        return False
    if goal == PADDING:
        memory = bound.llama_get_memory(context)
        for sequence in sequences:
            bound.llama_memory_seq_cp(memory, PADDING, sequence, -1, -1)
        bound.llama_memory_seq_rm(memory, PADDING, -1, -1)
    return True
