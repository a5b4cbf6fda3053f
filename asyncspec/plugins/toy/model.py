"""A model without tensors: every hidden state is a hash of all that a real one would depend on.

A row that attends to a wrong slot, a dead node or a stale key gives another token, so the pure
tests see every mistake in masks, slots and prunes. No torch, and exactly the same everywhere.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from asyncspec.backend import sampling
from asyncspec.backend.base import ModelInfo
from asyncspec.backend.tree_stage import TreeStage, check_hidden_states
from asyncspec.core.jobs import Batch, Forward, TensorRows
from asyncspec.core.rng import MASK, mix, stream
from asyncspec.core.sampling import Sampling, seen
from asyncspec.core.tensors import WireTensor
from asyncspec_protocol.limits import ITEM_BYTES
from asyncspec_protocol.messages import FINAL

DTYPE = "uint64"
"""Width of hidden states."""


class ToyState(Struct, frozen=True):
    """The model after some tokens: per layer what its cache holds, and the last token's hidden
    state before the first layer and after each."""

    caches: tuple[tuple[int, ...], ...]
    stream: tuple[int, ...]

    @property
    def hidden(self) -> int:
        """The last hidden state."""
        return self.stream[-1]


class ToyModel(Struct, frozen=True):
    """A target model. ``attention`` "parent" attends to one node only, for long cheap runs."""

    layers: int = 4
    vocab: int = 16
    seed: int = 0
    attention: Literal["all", "parent"] = "all"
    context: int = 4096

    @property
    def info(self) -> ModelInfo:
        return ModelInfo("Toy", self.layers, 1, self.vocab, self.context, (), DTYPE)

    def embed(self, token: int) -> int:
        """Hidden state that enters the first layer."""
        return mix((self.seed * 0x51ED + token * 0x9E37 + 1) & MASK)

    def key(self, layer: int, hidden: int) -> int:
        """What a layer's cache keeps of a node."""
        return mix((hidden + 0x1357 * (layer + 1)) & MASK)

    def attend(self, layer: int, hidden: int, visible: Sequence[int]) -> int:
        """Hidden state that leaves a layer, given the visible cache, oldest first."""
        seen = visible if self.attention == "all" else visible[-2:]
        return hash((layer, hidden, *seen)) & MASK

    def mode(self, hidden: int) -> int:
        """The most likely token after a node whose last hidden state this is."""
        return mix(hidden) % self.vocab

    def logits(self, hidden: Sequence[int]) -> sampling.Logits:
        """[n, vocab], of both signs, as a repetition penalty treats them differently."""
        streams = [stream(state, 0) for state in hidden]
        uniforms = sampling.uniforms_of(streams, np.arange(self.vocab))
        rows: sampling.Logits = (uniforms - 0.5).astype(np.float32)
        rows[np.arange(len(hidden)), [self.mode(state) for state in hidden]] = 1.5
        return rows

    def start(self) -> ToyState:
        """Before the first token."""
        return ToyState(caches=((),) * self.layers, stream=(0,))

    def extend(self, state: ToyState, token: int) -> ToyState:
        """The plain sequential forward pass, one token, no slots and no masks."""
        stream, caches = [self.embed(token)], []
        for layer, cache in enumerate(state.caches):
            seen = (*cache, self.key(layer, stream[-1]))
            stream.append(self.attend(layer, stream[-1], seen))
            caches.append(seen if self.attention == "all" else seen[-2:])
        return ToyState(tuple(caches), tuple(stream))

    def feature(self, state: ToyState, features: Sequence[int]) -> bytes:
        """What a stage hands over for the last token, as ``Open.features`` says."""
        hidden = self.norm(state.hidden)
        return feature([hidden if d == FINAL else state.stream[d] for d in features])

    def norm(self, hidden: int) -> int:
        """What the head reads."""
        return mix(hidden ^ 0x2468)

    def read(self, tokens: Sequence[int]) -> ToyState:
        """The model after all of ``tokens``."""
        state = self.start()
        for token in tokens:
            state = self.extend(state, token)
        return state

    def next_token(
        self,
        tokens: Sequence[int],
        settings: Sampling,
        prompt_length: int = 0,
        allowed: sampling.Tokens | None = None,
        state: ToyState | None = None,
    ) -> int:
        """The sequential reference: what comes after ``tokens``, which begin with the prompt, of
        the tokens ``allowed``. ``state``: after all of them, where that is known."""
        logits = self.logits([(state or self.read(tokens)).hidden])
        counts = [seen(tokens, prompt_length)]
        return sampling.draw(
            logits, [len(tokens)], settings, path_counts=counts, allowed=[allowed]
        )[0]


class ToyCache:
    """Keys of each layer by slot; an empty slot holds -1."""

    def __init__(self, layers: int) -> None:
        self.layers: list[list[int]] = [[] for _ in range(layers)]

    def copy_prefix(self, source: ToyCache, slots: int) -> None:
        self.layers = [layer[:slots] for layer in source.layers]

    def keep_state(self, slots: int) -> None:
        """There are no states."""

    def compact(self, start: int, keep: Sequence[int]) -> None:
        for layer in self.layers:
            layer[start:] = [layer[slot] for slot in keep]

    def trim(self, slots: int) -> None:
        for layer in self.layers:
            del layer[slots:]

    def read_slots(self, start: int, end: int) -> list[npt.NDArray[np.uint64]]:
        if not 0 <= start < end:
            raise ValueError(f"no slots [{start}, {end})")
        return [np.array(layer[start:end], np.uint64) for layer in self.layers]

    def write_slots(self, start: int, end: int, buffers: Sequence[memoryview]) -> bool:
        for layer, buffer in zip(self.layers, buffers, strict=True):
            layer[start:end] = np.frombuffer(buffer, np.uint64).tolist()
        return True

    def close(self) -> None:
        """Nothing to return."""

    def check(self, committed: int) -> None:
        assert len({len(layer) for layer in self.layers}) <= 1


class ToyStage(TreeStage[ToyCache]):
    """Layers [first, last) of a toy model; the last stage draws tokens. A row of a handle is a
    hidden state, a tuple of one and those captured so far, or a feature."""

    weights = DTYPE

    def __init__(self, model: ToyModel, first: int, last: int) -> None:
        super().__init__(model.info, (first, last), "bitwise")
        self._model = model

    def new_cache(self, capacity: int) -> ToyCache:
        return ToyCache(self.layers[1] - self.layers[0])

    @property
    def slot_format(self) -> str:
        return DTYPE

    def cache_bytes(self, slots: int) -> int:
        return slots * ITEM_BYTES[DTYPE] * (self.layers[1] - self.layers[0])

    def pass_seconds(self) -> dict[int, float]:
        """Some 5 us for a row and layer."""
        return {rows: 5e-6 * rows * (self.layers[1] - self.layers[0]) for rows in (1, 16)}

    def noise(self, rows: int) -> object:
        return tuple(range(rows))

    def compute(self, job: Forward | Batch, passes: Sequence[Forward]) -> tuple[object, ...]:
        return tuple(map(self._forward, passes))

    def _forward(self, job: Forward) -> object:
        session, model = self.begin(job), self._model
        hidden, captured = self._inputs(job)
        if 0 in session.depths:
            captured = [(h,) for h in hidden]
        for layer, cache in zip(range(*self.layers), session.cache.layers, strict=True):
            hidden = self._layer(job, layer, cache, hidden)
            if layer + 1 in session.depths:
                captured = [(*earlier, h) for earlier, h in zip(captured, hidden, strict=True)]
        if not self.has_head:
            return tuple((h, *c) if c else h for h, c in zip(hidden, captured, strict=True))
        if FINAL in session.depths:
            captured = [
                (*earlier, model.norm(h)) for earlier, h in zip(captured, hidden, strict=True)
            ]
        features = tuple(map(feature, captured)) if session.admit.features else None
        logits = model.logits([hidden[i] for i in job.head_rows])
        return session.sample(job, logits, features)

    def _inputs(self, job: Forward) -> tuple[list[int], list[tuple[int, ...]]]:
        """Hidden states, and beside each those captured before."""
        if job.hidden is None:
            return [self._model.embed(token) for token in job.tokens], [()] * len(job.tokens)
        handle = cast("Sequence[int | tuple[int, ...]]", job.hidden.handle)
        rows = [handle[row] for row in job.hidden.rows]
        split = [(row, ()) if isinstance(row, int) else (row[0], row[1:]) for row in rows]
        return [hidden for hidden, _ in split], [captured for _, captured in split]

    def _layer(self, job: Forward, layer: int, cache: list[int], hidden: list[int]) -> list[int]:
        model = self._model
        for row, h in zip(job.rows, hidden, strict=True):
            cache.extend([-1] * (row.slot + 1 - len(cache)))
            cache[row.slot] = model.key(layer, h)
        prefix = cache[: job.committed]
        prefix = prefix if model.attention == "all" else prefix[-2:]
        return [
            model.attend(layer, h, [*prefix, *(cache[slot] for slot in row.visible)])
            for row, h in zip(job.rows, hidden, strict=True)
        ]

    def pack(self, rows: TensorRows) -> WireTensor:
        return pack(rows)

    def unpack(self, tensor: WireTensor) -> object:
        check_hidden_states(tensor, DTYPE, 1)
        rows = unpack(tensor)
        return tuple(row[0] for row in rows) if len(tensor.shape) == 2 else rows


def feature(values: Sequence[int]) -> bytes:
    """Captured hidden states as the one thing a source reads."""
    return struct.pack(f"<{len(values)}Q", *values)


def pack(rows: TensorRows) -> WireTensor:
    """Rows of any kind as uint64: [n, 1], with C captured [n, 1 + C, 1], features [n, F]."""
    handle = cast("Sequence[int | tuple[int, ...] | bytes]", rows.handle)
    some = [handle[row] for row in rows.rows]
    data = b"".join(
        row if isinstance(row, bytes) else feature(row if isinstance(row, tuple) else (row,))
        for row in some
    )
    width = len(data) // 8 // len(some)
    shape = (len(some), width, 1) if isinstance(some[0], tuple) else (len(some), width)
    return WireTensor(dtype=DTYPE, shape=shape, data=memoryview(data))


def unpack(tensor: WireTensor) -> tuple[tuple[int, ...], ...]:
    """All numbers of each row. Raises ``ValueError`` for something else."""
    width = math.prod(tensor.shape[1:])
    if tensor.dtype != DTYPE or tensor.data.nbytes != 8 * width * tensor.shape[0]:
        raise ValueError(f"{tensor.dtype} {tensor.shape} in a toy pipeline")
    return tuple(struct.iter_unpack(f"<{width}Q", tensor.data))
