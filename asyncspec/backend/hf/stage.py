"""A pipeline stage on a Hugging Face checkpoint: ``StageBackend`` for ``asyncspec.jobs``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from asyncspec.backend.base import WireTensor
from asyncspec.backend.hf.attention import Abandoned, FastAttention, TreeAttention
from asyncspec.backend.hf.cache import TreeCache
from asyncspec.backend.hf.checkpoint import Checkpoint, resolve_dtype
from asyncspec.backend.hf.draw import draw
from asyncspec.backend.hf.exact import ExactAttention
from asyncspec.backend.hf.give_back import give_back
from asyncspec.backend.hf.proposals import best_successors, log_probs_of
from asyncspec.backend.hf.quantized import check_quantize
from asyncspec.backend.hf.recipe import Guarantee, Mode, Quantize, Recipe
from asyncspec.backend.hf.selftest import choose_recipe, confirm
from asyncspec.backend.hf.shard import Shard, load_shard
from asyncspec.backend.hf.tapped import depths_of, tapped
from asyncspec.backend.hf.wire import from_wire, select, to_wire
from asyncspec.backend.slot_tokens import SlotTokens
from asyncspec.jobs import Admit, Compact, Forward, Judged, Release, Row, Rows, StageJob
from asyncspec.sampling import Sampling
from asyncspec_protocol.ids import SessionId


@dataclass(slots=True)
class _Session:
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
        self._sessions: dict[SessionId, _Session] = {}
        self._useless: StageJob | None = None

    def run(self, job: StageJob) -> object | None:
        """See ``StageBackend``. Raises ``ValueError`` for a job that cannot be meant."""
        with torch.inference_mode():
            match job:
                case Admit():
                    self._admit(job)
                case Release(session):
                    self._release(session)
                case Compact(session, start, keep):
                    self._session(session).compact(start, keep)
                case Forward():
                    try:
                        return self._forward(job)
                    except Abandoned:
                        return ()
        return None

    def abandon(self, job: StageJob) -> None:
        """See ``StageBackend``."""
        self._useless = job

    def pack(self, rows: Rows) -> WireTensor:
        """See ``StageBackend``."""
        return to_wire(rows)

    def unpack(self, tensor: WireTensor) -> object:
        """See ``StageBackend``."""
        return from_wire(tensor, self.shard.dtype, self.shard.facts.hidden_size, taps=True)

    def check(self) -> None:
        """See ``StageBackend``."""
        for session in self._sessions.values():
            session.cache.check(session.committed)

    def cache_bytes(self, slots: int) -> int:
        """Memory a session of ``slots`` slots takes on this stage, in bytes."""
        return slots * self._shape.slot_bytes()

    @property
    def cache_bytes_held(self) -> int:
        """Memory the caches of all sessions take at the moment."""
        return sum(session.cache.bytes_held for session in self._sessions.values())

    def _release(self, session: SessionId) -> None:
        gone = self._sessions.pop(session, None)
        if gone is not None:
            freed = gone.cache.bytes_held
            del gone
            give_back(freed)

    def _admit(self, job: Admit) -> None:
        if job.session in self._sessions:
            raise ValueError(f"session {job.session} is admitted already")
        asked = self.shard.judges and job.sampling.penalises
        self._sessions[job.session] = _Session(
            cache=TreeCache(self._shape, job.capacity),
            sampling=job.sampling,
            tokens=SlotTokens(job.prompt_length) if asked else None,
            features=job.features,
            depths=depths_of(self.shard, job.features),
            tops=job.tops,
            log_probs=job.log_probs,
        )

    def _forward(self, job: Forward) -> torch.Tensor | tuple[int, ...] | Judged:
        session = self._session(job.session)
        inputs = self._inputs(job)
        carried: tuple[torch.Tensor, ...] = ()
        if inputs.dim() == 3:
            # The layers get what they would get without taps, to the last stride.
            carried, inputs = inputs[:, 1:].unbind(1), inputs[:, 0].contiguous()
        with tapped(self.shard, session.depths) as caught:
            result = self._pass(job, session, inputs)
        taps = [*carried, *caught]
        if isinstance(result, tuple):
            return Judged(result, torch.cat(taps, dim=1)) if session.features else result
        if isinstance(result, Judged):
            return replace(result, features=torch.cat(taps, dim=1) if session.features else None)
        return torch.stack([result, *taps], dim=1) if taps else result

    def _pass(
        self, job: Forward, session: _Session, inputs: torch.Tensor
    ) -> torch.Tensor | tuple[int, ...] | Judged:
        """Hidden states [n, H], or on the last stage the tokens that are drawn, and the likeliest
        ones where they are wanted."""
        positions = torch.from_numpy(np.array([row.position for row in job.rows], np.int64))
        tree = self._attention(session.cache, job.committed, job.rows)
        tree.stop = lambda: self._useless is job
        session.committed = job.committed
        if session.tokens is not None:
            session.tokens.write(job.committed, job.rows, self._tokens(job))
        if not job.judge:
            hidden = self.shard.hidden(inputs, positions, tree)
            return () if self.shard.judges else hidden
        if not self.shard.judges:
            raise ValueError("only the last stage judges")
        logits = self.shard.logits(inputs, positions, tree, torch.tensor(job.judge))
        judged = [job.rows[row] for row in job.judge]
        new = [row.position + 1 for row in judged]
        if (seen := session.tokens) is None:
            tokens = draw(logits, new, session.sampling)
        else:
            tokens = draw(logits, new, session.sampling, seen.counts, map(seen.own, judged))
        if not session.tops and not session.log_probs:
            return tokens
        best = best_successors(logits, session.tops) if session.tops else []
        return Judged(
            tokens,
            likely=tuple((tuple(t), tuple(p)) for t, p in best),
            drawn=log_probs_of(logits, tokens) if session.log_probs else (),
        )

    def _attention(self, cache: TreeCache, committed: int, rows: tuple[Row, ...]) -> TreeAttention:
        if self.mode == "exact":
            return ExactAttention(cache, committed, rows, self.recipe)
        return FastAttention(cache, committed, rows)

    def _inputs(self, job: Forward) -> torch.Tensor:
        """Tokens [n] or hidden states [n, H] or [n, 1 + taps, H], as they come to this stage."""
        if self.shard.embeds:
            return torch.tensor(self._tokens(job))
        if job.hidden is None or len(job.hidden.rows) != len(job.rows) or not job.rows:
            raise ValueError(f"no hidden states for {len(job.rows)} rows")
        return select(job.hidden)

    def _tokens(self, job: Forward) -> tuple[int, ...]:
        """A token for each row."""
        vocab = self.shard.facts.vocab_size
        if len(job.tokens) != len(job.rows) or not job.rows:
            raise ValueError(f"{len(job.tokens)} tokens for {len(job.rows)} rows")
        if min(job.tokens) < 0 or max(job.tokens) >= vocab:
            raise ValueError(f"a token that is not in the vocabulary of {vocab}")
        return job.tokens

    def _session(self, session: SessionId) -> _Session:
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
    weights are kept (docs/quantisation.md).

    Raises ``UserError`` or ``CheckpointError`` with what to change.
    """
    check_quantize(quantize)
    torch_dtype = resolve_dtype(checkpoint, dtype)
    with torch.inference_mode():
        start = Recipe(min_rows=1) if mode == "fast" else recipe or Recipe()
        shard = load_shard(checkpoint, first, last, torch_dtype, mode, start, quantize=quantize)
        give_back(shard.weight_bytes)
        if mode == "fast":
            return HFStage(shard, mode, start, "tolerance")
        if recipe is None:
            recipe = choose_recipe(shard)
        return HFStage(shard, mode, recipe, confirm(shard, recipe))
