"""A model without tensors: every hidden state is a hash of all that a real one would depend on.

A row that attends to a wrong slot, a dead node or a stale key gives another token, so the pure
tests see every mistake in masks, slots and prunes. No torch, and exactly the same everywhere.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Literal, cast

from msgspec import Struct

from asyncspec.backend.base import WireTensor
from asyncspec.backend.slot_tokens import SlotTokens
from asyncspec.core.jobs import (
    Admit,
    Batch,
    Compact,
    Forward,
    Release,
    Row,
    SamplerOutput,
    StageJob,
    TensorRows,
    Trim,
)
from asyncspec.core.rng import MASK, mix, uniforms
from asyncspec.core.sampling import NOTHING, Sampling, Seen, choose, seen
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import FINAL


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

    def logits(self, hidden: int) -> list[float]:
        """Of both signs, as a repetition penalty treats them differently."""
        logits = [number - 0.5 for number in uniforms(hidden, 0, self.vocab)]
        logits[self.mode(hidden)] = 1.5
        return logits

    def draw(self, hidden: int, before: Seen, position: int, sampling: Sampling) -> int:
        """The next token, at ``position``, after a path with the tokens ``before``."""
        if sampling.greedy and not sampling.penalises:
            return self.mode(hidden)
        return choose(self.logits(hidden), before, position, sampling)

    def likely(self, hidden: int, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The likeliest next tokens, best first, and their log-probabilities."""
        logits = self.logits(hidden)
        total = math.log(sum(map(math.exp, logits)))
        best = sorted(range(self.vocab), key=lambda t: (-logits[t], t))[:count]
        return tuple(best), tuple(min(0.0, logits[t] - total) for t in best)

    def log_prob(self, hidden: int, token: int) -> float:
        """The log-probability of one next token, before any sampling setting."""
        tokens, log_probs = self.likely(hidden, self.vocab)
        return log_probs[tokens.index(token)]

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
        if FINAL in features:
            return feature([self.norm(state.hidden)])
        return feature([state.stream[depth] for depth in features])

    def norm(self, hidden: int) -> int:
        """What the head reads."""
        return mix(hidden ^ 0x2468)

    def read(self, tokens: Sequence[int]) -> ToyState:
        """The model after all of ``tokens``."""
        state = self.start()
        for token in tokens:
            state = self.extend(state, token)
        return state

    def next_token(self, tokens: Sequence[int], sampling: Sampling, prompt_length: int = 0) -> int:
        """The sequential reference: what comes after ``tokens``, which begin with the prompt."""
        before = seen(tokens, prompt_length)
        return self.draw(self.read(tokens).hidden, before, len(tokens), sampling)


class _Session(Struct):
    """One session on a stage."""

    admit: Admit
    caches: list[list[int]]
    # On the last stage, where draws depend on them.
    tokens: SlotTokens | None


class ToyStage:
    """Layers [first, last) of a toy model with a slotted cache; the last stage draws tokens.

    A row of a handle is a hidden state, a tuple of one and those captured so far, or a feature.
    """

    def __init__(self, model: ToyModel, first: int, last: int) -> None:
        self._model = model
        self._layers = range(first, last)
        self._sessions: dict[SessionId, _Session] = {}

    def run(self, job: StageJob) -> object | None:
        match job:
            case Admit():
                self._admit(job)
            case Trim(session, slots):
                for cache in self._sessions[session].caches:
                    del cache[slots:]
            case Release(session):
                self._sessions.pop(session, None)
            case Compact(session, start, keep):
                for cache in self._sessions[session].caches:
                    cache[start:] = [cache[slot] for slot in keep]
                if (tokens := self._sessions[session].tokens) is not None:
                    tokens.compact(start, keep)
            case Forward():
                return self._forward(job)
            case Batch(passes):
                return tuple(self._forward(one) for one in passes)
        return None

    def _admit(self, job: Admit) -> None:
        caches: list[list[int]] = [[] for _ in self._layers]
        if job.common_prefix:
            parent = self._sessions[job.parent_session]
            caches = [cache[: job.common_prefix] for cache in parent.caches]
        counts = job.sampling.penalises and self._layers.stop == self._model.layers
        tokens = SlotTokens(job.prompt_length) if counts else None
        self._sessions[job.session] = _Session(job, caches, tokens)

    def _forward(self, job: Forward) -> object:
        model, session = self._model, self._sessions[job.session]
        admit, (hidden, captured) = session.admit, self._inputs(job)
        if job.hidden is None and 0 in admit.features:
            captured = [(h,) for h in hidden]
        for layer, cache in zip(self._layers, session.caches, strict=True):
            hidden = self._layer(job, layer, cache, hidden)
            if layer + 1 in admit.features:
                captured = [(*earlier, h) for earlier, h in zip(captured, hidden, strict=True)]
        if self._layers.stop < model.layers:
            return tuple((h, *c) if c else h for h, c in zip(hidden, captured, strict=True))
        if session.tokens is not None:
            session.tokens.write(job.committed, job.rows, job.tokens)
        tokens = tuple(self._draw(session, job.rows[i], hidden[i]) for i in job.sampled_rows)
        if not admit.features and not admit.top_logprobs and not admit.log_probs:
            return tokens
        if FINAL in admit.features:
            captured = [(model.norm(h),) for h in hidden]
        sampled = [hidden[i] for i in job.sampled_rows]
        likely = [model.likely(h, admit.top_logprobs) for h in sampled if admit.top_logprobs]
        drawn = zip(sampled, tokens, strict=True)
        return SamplerOutput(
            tokens,
            tuple(map(feature, captured)) if admit.features else None,
            tuple(likely),
            tuple(model.log_prob(*one) for one in drawn) if admit.log_probs else (),
        )

    def _draw(self, session: _Session, row: Row, hidden: int) -> int:
        tokens = session.tokens
        before = NOTHING if tokens is None else {**tokens.counts, **tokens.own(row)}
        return self._model.draw(hidden, before, row.position + 1, session.admit.sampling)

    def abandon(self, job: StageJob) -> None:
        """A pass is over before it could be stopped."""

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
        if tensor.shape[-1] != 1 or len(tensor.shape) not in (2, 3):
            raise ValueError(f"hidden states of {tensor.dtype} {tensor.shape} in a toy pipeline")
        rows = unpack(tensor)
        return tuple(row[0] for row in rows) if len(tensor.shape) == 2 else rows

    def check(self) -> None:
        for session in self._sessions.values():
            assert len({len(cache) for cache in session.caches}) <= 1

    def slots_held(self) -> dict[SessionId, int]:
        """Number of slots in use, by session (tests)."""
        return {key: len(session.caches[0]) for key, session in self._sessions.items()}


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
    return WireTensor(dtype="uint64", shape=shape, data=memoryview(data))


def unpack(tensor: WireTensor) -> tuple[tuple[int, ...], ...]:
    """All numbers of each row. Raises ``ValueError`` for something else."""
    width = math.prod(tensor.shape[1:])
    if tensor.dtype != "uint64" or tensor.data.nbytes != 8 * width * tensor.shape[0]:
        raise ValueError(f"{tensor.dtype} {tensor.shape} in a toy pipeline")
    return tuple(struct.iter_unpack(f"<{width}Q", tensor.data))
