"""What the stages of all backends do alike for a session: sampling its rows, and checks of jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from asyncspec.backend.slot_tokens import SlotTokens
from asyncspec.core.jobs import Forward, SamplerOutput
from asyncspec.core.sampling import NOTHING, Sampling, Seen
from asyncspec.source.expand import Proposal
from asyncspec_protocol.limits import MIN_LOG_PROB

L = TypeVar("L", contravariant=True)


class Sampler(Protocol[L]):
    """``asyncspec.backend.sampling``, or a module like it, for logits [n, vocab] of type ``L``."""

    def draw(
        self,
        logits: L,
        positions: Sequence[int],
        sampling: Sampling,
        committed: Seen = NOTHING,
        own: Iterable[Seen] = (),
        /,
    ) -> tuple[int, ...]:
        """A token for each row."""

    def best_successors(self, logits: L, most: int, /) -> list[Proposal]:
        """The likeliest tokens of each row."""

    def log_probs_of(self, logits: L, tokens: Sequence[int], /) -> tuple[float, ...]:
        """The log-probability of one token for each row."""


@dataclass(slots=True)
class StageSession:
    """How a session's request wants its tokens; ``tokens`` on the last stage, for penalties."""

    sampling: Sampling
    tokens: SlotTokens | None
    # Target hidden states that the token source reads (``Open.features``).
    features: tuple[int, ...]
    top_logprobs: int
    log_probs: bool

    def sample(
        self, job: Forward, logits: L, sampler: Sampler[L]
    ) -> tuple[int, ...] | SamplerOutput:
        """Sample from logits [len(job.sampled_rows), vocab]."""
        if not job.sampled_rows:
            return ()
        rows = [job.rows[row] for row in job.sampled_rows]
        positions = [row.position + 1 for row in rows]
        if (seen := self.tokens) is None:
            tokens = sampler.draw(logits, positions, self.sampling)
        else:
            own = map(seen.own, rows)
            tokens = sampler.draw(logits, positions, self.sampling, seen.counts, own)
        if not self.top_logprobs and not self.log_probs:
            return tokens
        top = sampler.best_successors(logits, self.top_logprobs) if self.top_logprobs else []
        log_probs = sampler.log_probs_of(logits, tokens) if self.log_probs else ()
        return SamplerOutput(
            tokens,
            top_tokens=tuple((tuple(t), _finite(p)) for t, p in top),
            token_log_probs=_finite(log_probs),
        )


def checked_tokens(job: Forward, vocab: int) -> tuple[int, ...]:
    """A token for each row. Raises ``ValueError``."""
    if len(job.tokens) != len(job.rows) or not job.rows:
        raise ValueError(f"{len(job.tokens)} tokens for {len(job.rows)} rows")
    if min(job.tokens) < 0 or max(job.tokens) >= vocab:
        raise ValueError(f"a token that is not in the vocabulary of {vocab}")
    return job.tokens


def _finite(log_probs: Sequence[float]) -> tuple[float, ...]:
    """Log-probabilities within the wire's limits; NaN counts as the least."""
    return tuple([p if p >= MIN_LOG_PROB else MIN_LOG_PROB for p in log_probs])
