"""A stage with a tree cache for each session: its jobs, checks and sampling, whatever computes."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from timeit import Timer
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from asyncspec.backend import sampling
from asyncspec.backend.base import CPU, DeviceMemory, Guarantee, ModelInfo
from asyncspec.backend.reference import SESSION, chain
from asyncspec.constraint.grammar import Grammars, PathMatcher, Tokens
from asyncspec.core import jobs
from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.jobs import Admit, Batch, Forward, Release, Row, SamplerOutput, StageJob
from asyncspec.core.sampling import Sampling, seen
from asyncspec.core.tensors import WireTensor
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.limits import ITEM_BYTES
from asyncspec_protocol.messages import FINAL

Arrays = npt.NDArray[Any]


class Abandoned(Exception):
    """The result of the running pass is not needed any more."""


class Cache(Protocol):
    """The keys and values of a session, by slot (``asyncspec.core.kv_slots``)."""

    def copy_prefix(self, source: Self, slots: int, /) -> None:
        """Begin with the first ``slots`` slots of another session, which are its committed path."""

    def keep_state(self, slots: int) -> None:
        """Keep the recurrent states after the first ``slots`` slots, once they are computed, for
        ``copy_prefix``."""

    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Slot ``start + i`` gets the contents of slot ``keep[i]``; ``keep`` ascends."""

    def trim(self, slots: int) -> None:
        """Keep the first ``slots`` slots alone; there is no further pass."""

    def read_slots(self, start: int, end: int) -> Sequence[Arrays] | None:
        """What slots [start, end) hold, once there is no further pass; None: they are not all
        there."""

    def write_slots(self, start: int, end: int, buffers: Sequence[memoryview]) -> bool:
        """Put that into slots [start, end), behind those that are there. Whether it is done."""

    def close(self) -> None:
        """Return all memory."""

    def check(self, committed: int) -> None:
        """Raise ``AssertionError`` where the cache violates its invariants."""


C = TypeVar("C", bound=Cache)
_Parts = Sequence[tuple[int, int, Sequence[memoryview]]]


class SlotTokens:
    """The tokens in a session's cache, by slot, which draws depend on. ``counts``: how often
    every committed token occurs in the answer; a row adds its few uncommitted ones. ``matcher``:
    the grammar of the answer. ``shared``: the first tokens, of the prompt, that are not read."""

    def __init__(
        self, prompt_length: int, matcher: PathMatcher | None = None, shared: int = 0
    ) -> None:
        # Length of the user's prompt; what comes after it is answer, also where a later session of
        # the same request has read it as part of its prompt.
        self._prompt = prompt_length
        self._tokens = [-1] * shared
        self._committed = shared
        self._matcher = matcher
        # Slots whose tokens the matcher has read.
        self._matched = shared
        self.counts: dict[int, int] = {}

    def write(self, committed: int, rows: Sequence[Row], tokens: Sequence[int]) -> None:
        """Record a pass: slots below ``committed`` are committed now, ``rows`` take theirs."""
        self.commit(committed)
        for row, token in zip(rows, tokens, strict=True):
            self._tokens += [-1] * (row.slot + 1 - len(self._tokens))
            self._tokens[row.slot] = token

    def commit(self, committed: int) -> None:
        """Slots below ``committed`` are the committed ones. They may be fewer again: all passes of
        a batch are written before the first of them draws."""
        if committed < self._committed:
            self.counts = dict(seen(self._tokens[:committed], self._prompt))
        for slot in range(self._committed, committed):
            token = self._tokens[slot]
            self.counts[token] = self.counts.get(token, 0) + (slot >= self._prompt)
        self._committed = committed

    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Keep of the slots from ``start`` on those in ``keep``, ascending, which move together."""
        self._tokens[start:] = [self._tokens[slot] for slot in keep]

    def own(self, row: Row) -> dict[int, int]:
        """Tokens of a row's uncommitted ancestors and itself: how often each occurs in the answer,
        the committed part included. Call it after ``commit`` for the row's pass."""
        counts: dict[int, int] = {}
        # Visible slots are one path, so their positions go on from the committed ones.
        for position, slot in enumerate(row.visible, start=self._committed):
            token = self._tokens[slot]
            count = counts.get(token, self.counts.get(token, 0))
            counts[token] = count + (position >= self._prompt)
        return counts

    def allowed(self, row: Row) -> Tokens | None:
        """The tokens that the grammar allows after a row; None: all, or the row itself is not
        allowed, and what it draws never counts. Call it as ``own``."""
        if self._matcher is None:
            return None
        start = max(self._matched, self._prompt)
        if start < self._committed:
            self._matcher.commit(self._tokens[start : self._committed])
            self._matched = self._committed
        path = [self._tokens[slot] for slot in row.visible]
        return self._matcher.allowed(path[max(0, self._prompt - self._committed) :])


@dataclass(slots=True)
class Session(Generic[C]):
    """What a stage holds of a session."""

    admit: Admit
    cache: C
    # On the last stage, for penalties and grammars.
    tokens: SlotTokens | None
    # Those of ``Admit.features`` that this stage computes.
    depths: tuple[int, ...]
    # Slots [0, committed) hold the committed path.
    committed: int = 0

    def sample(
        self, job: Forward, logits: sampling.Logits, features: object | None
    ) -> tuple[int, ...] | SamplerOutput:
        """Score and sample from logits [len(job.head_rows), vocab]. ``features``: [n, F], of all
        rows."""
        tokens = job.scored_tokens
        drawn = self._sample(job, logits[len(tokens) :], features)
        if not tokens:
            return drawn
        output = drawn if isinstance(drawn, SamplerOutput) else SamplerOutput(drawn, features)
        scores = sampling.prompt_logprobs(
            logits[: len(tokens)], tokens, max(0, self.admit.prompt_logprobs)
        )
        return replace(output, prompt_logprobs=scores)

    def _sample(
        self, job: Forward, logits: sampling.Logits, features: object | None
    ) -> tuple[int, ...] | SamplerOutput:
        """Sample from logits [len(job.sampled_rows), vocab]."""
        rows = [job.rows[row] for row in job.sampled_rows]
        if not rows:
            return () if features is None else SamplerOutput((), features)
        admit, positions = self.admit, [row.position + 1 for row in rows]
        if (counted := self.tokens) is None:
            allowed = self._not_ending(positions, [None] * len(rows), logits.shape[-1])
            tokens = sampling.draw(logits, positions, admit.sampling, allowed=allowed)
        else:
            counted.commit(job.committed)
            path_counts = map(counted.own, rows)
            allowed = [counted.allowed(row) for row in rows]
            allowed = self._not_ending(positions, allowed, logits.shape[-1])
            tokens = sampling.draw(
                logits, positions, admit.sampling, counted.counts, path_counts, allowed
            )
        if features is None and not admit.top_logprobs and not admit.log_probs:
            return tokens
        top = sampling.best_successors(logits, admit.top_logprobs) if admit.top_logprobs else []
        log_probs = sampling.log_probs_of(logits, tokens) if admit.log_probs else ()
        return SamplerOutput(
            tokens,
            features,
            top_tokens=tuple((tuple(t), sampling.finite(p)) for t, p in top),
            token_log_probs=sampling.finite(log_probs),
        )

    def _not_ending(
        self, positions: Sequence[int], allowed: list[Tokens | None], vocab: int
    ) -> list[Tokens | None]:
        """``allowed`` without the tokens that would end an answer before its minimal length, if
        there are others."""
        constraint, start = self.admit.sampling.constraint, self.admit.prompt_length
        if not constraint.min_tokens:
            return allowed
        allowed_tokens: list[Tokens | None] = []
        for position, tokens in zip(positions, allowed, strict=True):
            if position - start < constraint.min_tokens:
                among = np.arange(vocab) if tokens is None else tokens
                others = among[~np.isin(among, constraint.stop_tokens)]
                tokens = others if len(others) else tokens
            allowed_tokens.append(tokens)
        return allowed_tokens


class TreeStage(ABC, Generic[C]):
    """Layers [first, end) of a model, as a ``StageBackend``. Not thread-safe."""

    def __init__(self, info: ModelInfo, layers: tuple[int, int], guarantee: Guarantee) -> None:
        self.info, self.layers, self.guarantee = info, layers, guarantee
        self.has_embedding = layers[0] == 0
        self.has_head = layers[1] == info.layers
        self._sessions: dict[SessionId, Session[C]] = {}
        self._abandoned: StageJob | None = None
        self._grammars: Grammars | None = None

    @abstractmethod
    def new_cache(self, capacity: int) -> C:
        """For a session of ``capacity`` slots."""

    @abstractmethod
    def compute(self, job: Forward | Batch, passes: Sequence[Forward]) -> tuple[object, ...]:
        """The result of each pass of ``job``; each one is to ``begin``. Raises ``Abandoned``."""

    @abstractmethod
    def noise(self, rows: int) -> object:
        """A handle to random hidden states [rows, H]."""

    device = CPU

    def device_memory(self) -> DeviceMemory | None:
        """See ``StageBackend``: caches are in the host's memory."""
        return None

    @property
    def slot_format(self) -> str:
        """See ``StageBackend``: slots cannot be stored."""
        return ""

    @property
    def session_bytes(self) -> int:
        """See ``StageBackend``: all of a session is in its slots."""
        return 0

    def run(self, job: StageJob) -> object | None:
        """See ``StageBackend``. Raises ``ValueError`` for an invalid job."""
        match job:
            case Admit():
                self._admit(job)
            case jobs.Trim(session, slots):
                current = self._session(session)
                current.cache.trim(slots)
                current.tokens, current.committed = None, min(current.committed, slots)
            case jobs.Export(session, start, end):
                return tuple(self._session(session).cache.read_slots(start, end) or ())
            case jobs.Import():
                return (job.slots,) if self._import(job) else ()
            case Release(session):
                if (gone := self._sessions.pop(session, None)) is not None:
                    gone.cache.close()
            case jobs.Compact(session, start, keep):
                current = self._session(session)
                current.cache.compact(start, keep)
                if current.tokens is not None:
                    current.tokens.compact(start, keep)
            case Forward() | Batch():
                passes = job.passes if isinstance(job, Batch) else (job,)
                try:
                    results = self.compute(job, passes)
                except Abandoned:
                    results = ((),) * len(passes)
                return results if isinstance(job, Batch) else results[0]
        return None

    def constrain(self, grammars: Grammars) -> None:
        """See ``StageBackend``."""
        self._grammars = grammars

    def abandon(self, job: StageJob) -> None:
        """See ``StageBackend``. A pass notices it between its layers."""
        self._abandoned = job

    def check(self) -> None:
        """See ``StageBackend``. Raises ``AssertionError``."""
        for session in self._sessions.values():
            session.cache.check(session.committed)

    @property
    def chunk_rows(self) -> int:
        """Most rows that are computed at once where that may pay for a prompt; 0: those of
        ``trial_rows``."""
        return 0

    def pass_seconds(self) -> dict[int, float]:
        """See ``StageBackend``: of each number of rows the least seconds of a few passes."""
        clock = trial_clock(self.device)
        sizes = list(PARAMETERS.trial_rows)
        if self.chunk_rows > (usual := max(sizes)):
            sizes.insert(sizes.index(usual) + 1, self.chunk_rows)
        self.run(Admit(SESSION, 1 + max(sizes), Sampling()))
        seconds: dict[int, float] = {}
        end = time.perf_counter() + PARAMETERS.trial_seconds
        try:
            self.run(self._trial(0, 1))
            for rows in sizes:
                if len(seconds) >= 2 and time.perf_counter() >= end:
                    break
                timer = Timer(partial(self.run, self._trial(1, rows)), timer=clock)
                seconds[rows] = timer.timeit(1)  # includes the setup of the first pass of a size
                if seconds[rows] < PARAMETERS.trial_repeat_seconds:
                    repeats = timer.repeat(PARAMETERS.trial_repeats, 1)
                    seconds[rows] = min(seconds[rows], *repeats)
        finally:
            self.run(Release(SESSION))
        return dict(sorted(seconds.items()))

    def _trial(self, start: int, rows: int) -> Forward:
        tokens = [i % self.info.vocab_size for i in range(rows)]
        sampled = tuple(range(rows)) if self.has_head else ()
        return chain(SESSION, start, tokens, self.noise(rows), sampled)

    def begin(self, job: Forward) -> Session[C]:
        """Check a pass and record its tokens. Raises ``ValueError``."""
        session = self._session(job.session)
        if job.head_rows and not self.has_head:
            raise ValueError("only the last stage samples")
        if job.scored_tokens and max(job.scored_tokens) >= self.info.vocab_size:
            raise ValueError(f"a scored token that is not among {self.info.vocab_size}")
        if self.has_embedding or session.tokens is not None:
            vocab = self.info.vocab_size
            if len(job.tokens) != len(job.rows) or not job.rows:
                raise ValueError(f"{len(job.tokens)} tokens for {len(job.rows)} rows")
            if min(job.tokens) < 0 or max(job.tokens) >= vocab:
                raise ValueError(f"a token that is not in the vocabulary of {vocab}")
        if not self.has_embedding and (
            job.hidden is None or len(job.hidden.rows) != len(job.rows) or not job.rows
        ):
            raise ValueError(f"no hidden states for {len(job.rows)} rows")
        session.committed = job.committed
        if session.tokens is not None:
            session.tokens.write(job.committed, job.rows, job.tokens)
        return session

    def _admit(self, job: Admit) -> None:
        if job.session in self._sessions:
            raise ValueError(f"session {job.session} is admitted already")
        if job.common_prefix > job.sampling.shareable(job.prompt_length, job.common_prefix):
            raise ValueError("a session whose draws depend on tokens must read them all")
        parent = self._session(job.parent_session) if job.common_prefix else None
        cache = self.new_cache(job.capacity)
        if parent is not None:
            cache.copy_prefix(parent.cache, job.common_prefix)
        if job.kept_state:
            cache.keep_state(job.kept_state)
        tokens, grammar = None, job.sampling.constraint.grammar
        if self.has_head and job.sampling.reads_path:
            if grammar and self._grammars is None:
                raise ValueError("a grammar for a stage without a tokenizer")
            matcher = self._grammars.peers_matcher(grammar) if grammar and self._grammars else None
            tokens = SlotTokens(job.prompt_length, matcher, job.common_prefix)
        depths = tuple(filter(self._computes, job.features))
        self._sessions[job.session] = Session(job, cache, tokens, depths)

    def _import(self, job: jobs.Import) -> bool:
        """Whether all of it is there."""
        self._admit(Admit(job.session, job.slots, Sampling()))
        cache, parts = self._sessions[job.session].cache, cast("_Parts", job.parts)
        if all(cache.write_slots(start, end, buffers) for start, end, buffers in parts):
            self._sessions[job.session].committed = job.slots
            return True
        self._sessions.pop(job.session).cache.close()
        return False

    def _computes(self, depth: int) -> bool:
        """Whether hidden states of this depth of ``Open.features`` are computed here."""
        first, end = self.layers
        if depth == FINAL:
            return self.has_head
        return first < depth <= end or depth == first == 0

    def _session(self, session: SessionId) -> Session[C]:
        if session not in self._sessions:
            raise ValueError(f"session {session} was never admitted")
        return self._sessions[session]


def trial_clock(device: str) -> Callable[[], float]:
    """What passes are timed with while a stage is loaded. On the processor the seconds of this
    thread: all nodes of a machine may be loading on its cores."""
    return time.thread_time if device == CPU else time.perf_counter


def check_hidden_states(
    wire: WireTensor, dtype: str, width: int, dimensions: tuple[int, ...] = (2, 3)
) -> None:
    """Raise ``ValueError`` for other than [n, width] or, with captured ones, [n, 1 + captured,
    width]."""
    if wire.dtype != dtype:
        raise ValueError(f"hidden states of type {wire.dtype}, expected {dtype}")
    shape = wire.shape
    if len(shape) not in dimensions or shape[-1] != width or min(shape) < 1:
        raise ValueError(f"hidden states of shape {shape}, expected (n, {width})")
    size = math.prod(shape) * ITEM_BYTES[dtype]
    if wire.data.nbytes != size:
        raise ValueError(f"hidden states of {wire.data.nbytes} bytes, expected {size}")
