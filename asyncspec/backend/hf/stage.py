"""One session on one Hugging Face stage: its cache, and what becomes of its rows of a pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from msgspec.structs import replace

from asyncspec.backend.base import Guarantee, Mode, Quantize, WireTensor
from asyncspec.backend.hf.attention import (
    Abandoned,
    FastAttention,
    TogetherAttention,
    Tree,
    TreeAttention,
    slices,
)
from asyncspec.backend.hf.cache import TreeCache
from asyncspec.backend.hf.checkpoint import Checkpoint, resolve_dtype
from asyncspec.backend.hf.eagle.hidden_states import depths_of, tapped
from asyncspec.backend.hf.exact_attention import ExactAttention
from asyncspec.backend.hf.kernels.cpu.capabilities import FAST, Recipe
from asyncspec.backend.hf.kernels.cpu.dense import set_quick_floor
from asyncspec.backend.hf.kernels.cpu.quantized import check_quantize
from asyncspec.backend.hf.probing import noise
from asyncspec.backend.hf.process import HeapTrimmer
from asyncspec.backend.hf.sampling import best_successors, draw, log_probs_of
from asyncspec.backend.hf.self_test import choose_recipe, confirm
from asyncspec.backend.hf.shard import Shard, load_shard
from asyncspec.backend.hf.wire import from_wire, select, to_wire
from asyncspec.backend.slot_tokens import SlotTokens
from asyncspec.core.cost_model.parameters import PARAMETERS
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
from asyncspec.core.sampling import Sampling
from asyncspec_protocol.ids import SegmentId, SessionId
from asyncspec_protocol.limits import MIN_LOG_PROB
from asyncspec_protocol.messages import FINAL

Output = torch.Tensor | tuple[int, ...] | SamplerOutput
"""Hidden states [n, H], or on the last stage the tokens that are drawn."""


@dataclass(slots=True)
class StageSession:
    """A session's cache and what its request asks for."""

    cache: TreeCache
    sampling: Sampling
    # On the last stage, where draws depend on them.
    tokens: SlotTokens | None
    # What the token source reads of the target, and what of it becomes known here.
    features: tuple[int, ...]
    depths: tuple[int, ...]
    # Likeliest tokens that are given beside the drawn one.
    tops: int
    log_probs: bool
    committed: int = 0

    def compact(self, start: int, keep: tuple[int, ...]) -> None:
        """See ``Compact``."""
        self.cache.compact(start, keep)
        if self.tokens is not None:
            self.tokens.compact(start, keep)

    def judge(self, job: Forward, logits: torch.Tensor) -> tuple[int, ...] | SamplerOutput:
        """Sample from logits [len(job.sampled_rows), vocab]; the likeliest tokens where wanted."""
        if not job.sampled_rows:
            return ()
        verified = [job.rows[row] for row in job.sampled_rows]
        new = [row.position + 1 for row in verified]
        if (seen := self.tokens) is None:
            tokens = draw(logits, new, self.sampling)
        else:
            tokens = draw(logits, new, self.sampling, seen.counts, map(seen.own, verified))
        if not self.tops and not self.log_probs:
            return tokens
        best = best_successors(logits, self.tops) if self.tops else []
        return SamplerOutput(
            tokens,
            top_tokens=tuple((tuple(t), _finite(p)) for t, p in best),
            token_log_probs=_finite(log_probs_of(logits, tokens)) if self.log_probs else (),
        )

    def result(self, output: Output, taps: Sequence[torch.Tensor]) -> Output:
        """What a pass gives, with the tapped hidden states [n, H] of its rows, low to high."""
        if isinstance(output, tuple):
            return SamplerOutput(output, torch.cat(list(taps), dim=1)) if self.features else output
        if isinstance(output, SamplerOutput):
            features = torch.cat(list(taps), dim=1) if self.features else None
            return replace(output, features=features)
        return torch.stack([output, *taps], dim=1) if taps else output


def _finite(log_probs: Sequence[float]) -> tuple[float, ...]:
    """Log-probabilities as they may travel: of a logit that is no number, as good as impossible."""
    return tuple([p if p >= MIN_LOG_PROB else MIN_LOG_PROB for p in log_probs])


# --- A pipeline stage on a Hugging Face checkpoint: ``StageBackend`` for ``asyncspec.core.jobs``.


class HFStage:
    """Layers [first, last) of a checkpoint with a tree cache per session. One thread only."""

    def __init__(self, shard: Shard, mode: Mode, recipe: Recipe, guarantee: Guarantee) -> None:
        self.shard = shard
        self.mode = mode
        self.recipe = recipe
        # What the start-up self-test vouches for: equal bits with and without speculation, or
        # ordinary rounding differences.
        self.guarantee = guarantee
        self._shape = shard.cache_shape(mode)
        self._sessions: dict[SessionId, StageSession] = {}
        self._useless: StageJob | None = None
        self._freed = HeapTrimmer()

    def run(self, job: StageJob) -> object | None:
        """See ``StageBackend``. Raises ``ValueError`` for a job that cannot be meant."""
        with torch.inference_mode():
            match job:
                case Admit():
                    self._admit(job)
                case Trim(session, slots):
                    self._trim(session, slots)
                case Release(session):
                    self._release(session)
                case Compact(session, start, keep):
                    self._session(session).compact(start, keep)
                case Forward():
                    return self._compute(job)[0]
                case Batch():
                    return self._compute(job)
        return None

    def abandon(self, job: StageJob) -> None:
        """See ``StageBackend``."""
        self._useless = job

    def pack(self, rows: TensorRows) -> WireTensor:
        """See ``StageBackend``."""
        return to_wire(rows)

    def unpack(self, tensor: WireTensor) -> object:
        """See ``StageBackend``."""
        return from_wire(tensor, self.shard.dtype, self.shard.info.hidden_size, taps=True)

    def check(self) -> None:
        """See ``StageBackend``."""
        for session in self._sessions.values():
            session.cache.check(session.committed)

    @property
    def weights(self) -> str:
        """See ``LoadedStage``."""
        return self.shard.in_words()

    def pass_seconds(self) -> dict[int, float]:
        """See ``LoadedStage``."""
        return pass_seconds(self)

    def cache_bytes(self, slots: int) -> int:
        """Memory a session of ``slots`` slots takes on this stage, in bytes."""
        return slots * self._shape.slot_bytes()

    @property
    def cache_bytes_held(self) -> int:
        """Memory the caches of all sessions take at the moment."""
        return sum(session.cache.bytes_held for session in self._sessions.values())

    def _trim(self, session: SessionId, slots: int) -> None:
        held = self._session(session)
        before = held.cache.bytes_held
        held.cache, held.tokens = held.cache.trimmed(slots), None
        held.committed = min(held.committed, slots)
        self._freed.add(before)

    def _release(self, session: SessionId) -> None:
        gone = self._sessions.pop(session, None)
        if gone is not None:
            freed = gone.cache.bytes_held
            del gone
            self._freed.add(freed)

    def _admit(self, job: Admit) -> None:
        if job.session in self._sessions:
            raise ValueError(f"session {job.session} is admitted already")
        if job.common_prefix and job.sampling.penalises:
            raise ValueError("a session that penalises tokens must read them all")
        asked = self.shard.judges and job.sampling.penalises
        cache = TreeCache(self._shape, job.capacity)
        if job.common_prefix:
            cache.begin_like(self._session(job.parent_session).cache, job.common_prefix)
        self._sessions[job.session] = StageSession(
            cache=cache,
            sampling=job.sampling,
            tokens=SlotTokens(job.prompt_length) if asked else None,
            features=job.features,
            depths=depths_of(self.shard, job.features),
            tops=job.top_logprobs,
            log_probs=job.log_probs,
        )

    def _compute(self, job: Forward | Batch) -> tuple[object, ...]:
        """The result of each pass of a job."""
        passes = job.passes if isinstance(job, Batch) else (job,)
        sessions = [self._session(one.session) for one in passes]
        inputs = [self._inputs(one) for one in passes]
        # The layers get what they would get without taps, to the last stride.
        carried = [rows[:, 1:].unbind(1) if rows.dim() == 3 else () for rows in inputs]
        inputs = [rows[:, 0].contiguous() if rows.dim() == 3 else rows for rows in inputs]
        trees = [self._attention(s.cache, one) for s, one in zip(sessions, passes, strict=True)]
        tree: Tree = trees[0] if len(trees) == 1 else TogetherAttention(trees)
        tree.stop = lambda: self._useless is job
        depths = sorted({depth for session in sessions for depth in session.depths}, key=_late)
        try:
            with tapped(self.shard, depths) as caught:
                outputs = self._pass(
                    passes, sessions, inputs[0] if len(inputs) == 1 else torch.cat(inputs), tree
                )
        except Abandoned:
            return ((),) * len(passes)
        seen = dict(zip(depths, caught, strict=True))
        taps = (
            [*before, *(seen[depth][own] for depth in session.depths)]
            for before, session, own in zip(carried, sessions, slices(trees), strict=True)
        )
        return tuple(map(StageSession.result, sessions, outputs, taps))

    def _pass(
        self,
        passes: Sequence[Forward],
        sessions: Sequence[StageSession],
        inputs: torch.Tensor,
        tree: Tree,
    ) -> Sequence[Output]:
        """For each session hidden states [n, H], or on the last stage the tokens that are drawn,
        and the likeliest ones where they are wanted."""
        rows = [row for one in passes for row in one.rows]
        positions = torch.from_numpy(np.array([row.position for row in rows], np.int64))
        for one, session in zip(passes, sessions, strict=True):
            session.committed = one.committed
            if session.tokens is not None:
                session.tokens.write(one.committed, one.rows, self._tokens(one))
        starts = accumulate((len(one.rows) for one in passes), initial=0)
        verified = [
            start + row
            for one, start in zip(passes, starts, strict=False)
            for row in one.sampled_rows
        ]
        if not verified:
            hidden = self.shard.hidden(inputs, positions, tree)
            if self.shard.judges:
                return [()] * len(passes)
            return torch.split_with_sizes(hidden, [len(one.rows) for one in passes])
        if not self.shard.judges:
            raise ValueError("only the last stage judges")
        logits = self.shard.logits(inputs, positions, tree, torch.tensor(verified))
        own = torch.split_with_sizes(logits, [len(one.sampled_rows) for one in passes])
        parts = zip(passes, sessions, own, strict=True)
        return [session.judge(one, rows) for one, session, rows in parts]

    def _attention(self, cache: TreeCache, job: Forward) -> TreeAttention:
        if self.mode == "exact":
            return ExactAttention(cache, job.committed, job.rows, self.recipe)
        return FastAttention(cache, job.committed, job.rows)

    def _inputs(self, job: Forward) -> torch.Tensor:
        """Tokens [n] or hidden states [n, H] or [n, 1 + taps, H], as they come to this stage."""
        if self.shard.embeds:
            return torch.tensor(self._tokens(job))
        if job.hidden is None or len(job.hidden.rows) != len(job.rows) or not job.rows:
            raise ValueError(f"no hidden states for {len(job.rows)} rows")
        return select(job.hidden)

    def _tokens(self, job: Forward) -> tuple[int, ...]:
        """A token for each row."""
        vocab = self.shard.info.vocab_size
        if len(job.tokens) != len(job.rows) or not job.rows:
            raise ValueError(f"{len(job.tokens)} tokens for {len(job.rows)} rows")
        if min(job.tokens) < 0 or max(job.tokens) >= vocab:
            raise ValueError(f"a token that is not in the vocabulary of {vocab}")
        return job.tokens

    def _session(self, session: SessionId) -> StageSession:
        if session not in self._sessions:
            raise ValueError(f"session {session} was never admitted")
        return self._sessions[session]


def load_stage(
    checkpoint: Checkpoint,
    first: int,
    last: int,
    *,
    dtype: str = "auto",
    mode: Mode = "exact",
    recipe: Recipe | None = None,
    quantize: Quantize = "none",
) -> HFStage:
    """Read layers [first, last) and make them a stage. In exact mode the kernels are tried out
    first, unless a ``recipe`` is given, and the loaded stage afterwards. ``quantize``: how the
    weights are kept (docs/guide/own-models.md).

    Raises ``UserError`` or ``CheckpointError`` with what to change.
    """
    check_quantize(quantize)
    torch_dtype = resolve_dtype(checkpoint, dtype)
    with torch.inference_mode():
        start = FAST if mode == "fast" else recipe or Recipe()
        shard = load_shard(checkpoint, first, last, torch_dtype, mode, start, quantize=quantize)
        HeapTrimmer().add(shard.weight_bytes)
        if mode == "fast":
            set_quick_floor(shard.linears)
            return HFStage(shard, mode, start, "tolerance")
        if recipe is None:
            recipe = choose_recipe(shard)
            set_quick_floor(shard.linears)
        return HFStage(shard, mode, recipe, confirm(shard, recipe))


def _late(depth: int) -> float:
    """Orders depths as they become known: the final norm comes last."""
    return float("inf") if depth == FINAL else depth


# --- What passes of some sizes take on this device, tried at start.
# So a draft node knows from the first request on how many rows are cheap here, and need not learn
# it from dozens of passes that are wider than they should be.

_NOBODY = SessionId(-1)


def pass_seconds(stage: HFStage, enough: float = PARAMETERS.trial_seconds) -> dict[int, float]:
    """By rows, ascending, the least time of a few passes of each of ``trial_rows``, or the first of
    them. The stage is as before."""
    stage.run(Admit(_NOBODY, 1 + max(PARAMETERS.trial_rows), Sampling()))
    taken: dict[int, float] = {}
    end = time.perf_counter() + enough
    try:
        stage.run(_chain(stage, 0, 1))
        for rows in PARAMETERS.trial_rows:
            if len(taken) < 2 or time.perf_counter() < end:
                taken[rows] = _least(stage, _chain(stage, 1, rows))
    finally:
        stage.run(Release(_NOBODY))
    return dict(sorted(taken.items()))


def _least(stage: HFStage, job: Forward) -> float:
    least = _seconds(stage, job)  # with what the first of a size takes to be set up
    for _ in range(PARAMETERS.trial_repeats if least < PARAMETERS.trial_repeat_seconds else 0):
        least = min(least, _seconds(stage, job))
    return least


def _seconds(stage: HFStage, job: Forward) -> float:
    start = time.perf_counter()
    stage.run(job)
    return time.perf_counter() - start


def _chain(stage: HFStage, start: int, rows: int) -> Forward:
    """A pass over a chain from position ``start`` on, all of it verified where there is a head."""
    shard = stage.shard
    handle = noise(rows, shard.info.hidden_size).to(shard.dtype)
    return Forward(
        session=_NOBODY,
        segment=SegmentId(0),
        committed=start,
        rows=tuple(
            Row(start + i, start + i, tuple(range(start, start + i + 1))) for i in range(rows)
        ),
        tokens=tuple(i % shard.info.vocab_size for i in range(rows)),
        hidden=TensorRows(handle, tuple(range(rows))),
        sampled_rows=tuple(range(rows)) if shard.judges else (),
    )
