"""A target's answers with its hidden states: sequential decoding of several sessions at a time, by
a stage of all layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from itertools import islice
from typing import cast

import numpy as np
from msgspec import Struct

from asyncspec.backend.base import StageBackend
from asyncspec.backend.feature_shards import Bits, Collected, bfloat16_bits
from asyncspec.backend.reference import CHUNK, chain
from asyncspec.core.jobs import Admit, Batch, Forward, Release, SamplerOutput, TensorRows
from asyncspec.core.sampling import Sampling
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import FINAL


class Sample(Struct, frozen=True):
    """A prompt to answer once."""

    number: int
    prompt: tuple[int, ...]
    # Tokens of the answer at most.
    tokens: int
    temperature: float
    seed: int


class _Session:
    """A sample being answered."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.id = SessionId(-2 - sample.number)
        self.tokens = [*sample.prompt]
        self.rows: list[Bits] = []
        self.read = 0

    def admit(self, depths: tuple[int, ...]) -> Admit:
        sample = self.sample
        capacity = len(sample.prompt) + sample.tokens
        sampling = Sampling(temperature=sample.temperature, seed=sample.seed)
        length = len(sample.prompt)
        return Admit(self.id, capacity, sampling, length, features=(*depths, FINAL))

    def next_pass(self) -> Forward:
        """A chunk of the prompt, or the newest token."""
        chunk = self.tokens[self.read : self.read + CHUNK]
        last = self.read + len(chunk) == len(self.tokens)
        return chain(self.id, self.read, chunk, None, (len(chunk) - 1,) if last else ())

    def take(self, stage: StageBackend, job: Forward, output: SamplerOutput) -> None:
        """What a pass gave."""
        handle = TensorRows(output.features, tuple(range(len(job.rows))))
        self.rows.append(bfloat16_bits(stage.pack(handle)).copy())
        self.read += len(job.rows)
        self.tokens += output.tokens

    def done(self, stop_tokens: Collection[int]) -> bool:
        answer = len(self.tokens) - len(self.sample.prompt)
        return answer > 0 and (self.tokens[-1] in stop_tokens or answer >= self.sample.tokens)

    @property
    def collected(self) -> Collected:
        """All tokens that the target has read: not the last one."""
        features = np.concatenate(self.rows)
        sample = self.sample
        tokens = self.tokens[: len(features)]
        return Collected(sample.number, tokens, len(sample.prompt), features)


class LocalAnswers(Struct, frozen=True):
    """A target in this process, ``sessions`` answers at a time."""

    stage: StageBackend
    stop_tokens: Collection[int]
    sessions: int

    def __call__(
        self,
        depths: tuple[int, ...],
        samples: Iterator[Sample],
        between: Callable[[int], None],
        refused: Callable[[Sample], None],
    ) -> Generator[Collected]:
        """Answers as they are done; none is refused."""
        return answer_all(self.stage, depths, samples, self.stop_tokens, self.sessions, between)


def answer_all(
    stage: StageBackend,
    depths: tuple[int, ...],
    samples: Iterator[Sample],
    stop_tokens: Collection[int],
    sessions: int,
    between: Callable[[int], None] = lambda tokens: None,
) -> Generator[Collected]:
    """Answers as they are done, ``sessions`` at a time. ``between`` is called after every pass with
    the tokens drawn in it."""
    active: list[_Session] = []
    try:
        while True:
            for sample in islice(samples, sessions - len(active)):
                active.append(_Session(sample))
                stage.run(active[-1].admit(depths))
            if not active:
                return
            passes = tuple(session.next_pass() for session in active)
            results = cast("tuple[SamplerOutput, ...]", stage.run(Batch(passes)))
            for session, job, output in zip(active, passes, results, strict=True):
                session.take(stage, job, output)
            between(sum(len(output.tokens) for output in results))
            for session in [*active]:
                if session.done(stop_tokens):
                    active.remove(session)
                    stage.run(Release(session.id))
                    yield session.collected
    finally:
        for session in active:
            stage.run(Release(session.id))
