"""Each stage of a cluster by itself: what it made of what the stage before it had made, beside what
its layers make of that here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from asyncspec.backend.base import StageBackend
from asyncspec.backend.reference import SESSION, chain
from asyncspec.core.jobs import Admit, Release, SamplerOutput, TensorRows
from asyncspec.core.sampling import Sampling
from asyncspec.core.tensors import WireTensor
from asyncspec_nodes.roles.stage_probe import ProbedChunk, StageStates

Numbers = NDArray[np.float64]

EPSILON = {"float32": 2.0**-15, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Distance of 1 from the next number of a type; of float32, which adds up most roundings unseen,
a good deal more."""

COARSEST = 2.0**-7
"""That of stages that are not bitwise equal even to themselves: of llama.cpp, which rounds what it
multiplies to eight bits, and of mode "fast"."""

LAYER_ROUNDINGS = 32.0
"""So many times that a layer may differ, in units of a row's middle number. Stages of three layers
of the bundled target, with AVX-512 and with SSE 4.1: 4e-6 in float32, .05 in bfloat16."""


class Deviation(Struct, frozen=True):
    """The largest of a chunk in which a stage differs. ``what``: of its results."""

    position: int
    what: str
    value: float
    reference: float

    def __str__(self) -> str:
        return (
            f"{self.what} at token {self.position + 1} of prompt and answer: {self.value:.4g}, not "
            f"{self.reference:.4g}"
        )


def wrong_stages(
    stages: Sequence[StageBackend], probed: StageStates
) -> dict[int, dict[int, Deviation]]:
    """By text the ranks of stages that computed otherwise than ``stages`` do here, and where. Those
    that are on this machine and bitwise equal to themselves must be so to these."""
    wrong: dict[int, dict[int, Deviation]] = {}
    spans = [*pairwise((0, *probed.depths))]
    for text, chunks in groupby(probed.chunks, key=lambda chunk: chunk.text):
        read, deviations = tuple(chunks), wrong.setdefault(text, {})
        for index, (stage, (first, end)) in enumerate(zip(stages, spans, strict=True)):
            local = _LocalStage(stage, index, len(stages), end)
            tolerance = _tolerance(stage, read[0].states.dtype, end - first, probed.same_machine)
            if (deviation := local.compare(read, tolerance)) is not None:
                deviations[index + 1] = deviation
    return wrong


def _tolerance(stage: StageBackend, dtype: str, layers: int, same_machine: bool) -> float:
    bitwise = stage.guarantee == "bitwise"
    if bitwise and same_machine:
        return 0.0
    epsilon = EPSILON.get(dtype, 0.0)
    return LAYER_ROUNDINGS * math.sqrt(layers) * (epsilon if bitwise else max(COARSEST, epsilon))


class _LocalStage:
    """One stage here, that reads what the cluster's read. ``end``: of its layers."""

    def __init__(self, stage: StageBackend, index: int, stages: int, end: int) -> None:
        self._stage = stage
        self._index = index
        self._stages = stages
        self._last = index == stages - 1
        self._end = end

    def compare(self, chunks: Sequence[ProbedChunk], tolerance: float) -> Deviation | None:
        """The first deviation in a text."""
        length = sum(len(chunk.tokens) for chunk in chunks)
        admit = Admit(SESSION, length + 1, Sampling(), length)
        if self._last:
            admit = replace(admit, features=(self._end,), prompt_logprobs=0)
        self._stage.run(admit)
        try:
            start = 0
            for chunk in chunks:
                if (deviation := self._compare_chunk(chunk, start, tolerance)) is not None:
                    return replace(deviation, position=start + deviation.position)
                start += len(chunk.tokens)
        finally:
            self._stage.run(Release(SESSION))
        return None

    def _compare_chunk(self, chunk: ProbedChunk, start: int, tolerance: float) -> Deviation | None:
        theirs, count = chunk.states, len(chunk.tokens)
        hidden = None
        if self._index:
            hidden = self._stage.unpack(_part(theirs, self._index - 1, self._stages))
        job = chain(SESSION, start, chunk.tokens, hidden, ())
        scores: tuple[float, ...] = ()
        if self._last:
            job = replace(job, scored_tokens=chunk.next_tokens)
        result = self._stage.run(job)
        if isinstance(result, SamplerOutput):
            scores = result.prompt_logprobs.log_probs if result.prompt_logprobs else ()
            result = result.features
        ours = self._stage.pack(TensorRows(result, tuple(range(count))))
        states = _part(theirs, self._index, self._stages)
        found = _deviation("a hidden state", numbers(states), numbers(ours), tolerance)
        if found is not None or not self._last:
            return found
        what = "the log-probability"
        return _deviation(what, _column(chunk.log_probs), _column(scores), tolerance)


def _part(states: WireTensor, index: int, stages: int) -> WireTensor:
    """The states at one stage's end [n, H], of those of all side by side."""
    rows, width = states.shape
    data = np.frombuffer(states.data, np.uint8).reshape(rows, stages, -1)[:, index]
    part = np.ascontiguousarray(data)
    return WireTensor(states.dtype, (rows, width // stages), part.data.cast("B"))


def numbers(states: WireTensor) -> Numbers:
    """[n, H], of any type: of one that numpy does not have, too."""
    if states.dtype == "bfloat16":
        bits = np.frombuffer(states.data, np.uint16).astype(np.uint32) << 16
        values = bits.view(np.float32).astype(np.float64)
    else:
        values = np.frombuffer(states.data, np.dtype(states.dtype)).astype(np.float64)
    return values.reshape(states.shape)


def _column(log_probs: Sequence[float]) -> Numbers:
    return np.asarray(log_probs, np.float64)[:, None]


def _deviation(
    what: str, values: Numbers, reference: Numbers, tolerance: float
) -> Deviation | None:
    """The largest of those beyond ``tolerance``, in units of what is larger, the number itself or
    the middle one of its row; of log-probabilities, or 1."""
    if not values.size:
        return None
    middle = np.median(np.abs(reference), axis=1, keepdims=True)
    unit = np.maximum(np.maximum(np.abs(reference), middle), 1.0 if values.shape[1] == 1 else 1e-30)
    differences = np.abs(values - reference) / unit
    differences[~np.isfinite(differences)] = np.inf
    row, column = np.unravel_index(np.argmax(differences), differences.shape)
    if differences[row, column] <= tolerance:
        return None
    return Deviation(int(row), what, float(values[row, column]), float(reference[row, column]))
