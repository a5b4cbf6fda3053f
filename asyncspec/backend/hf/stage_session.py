"""One session on one Hugging Face stage: its cache, and what becomes of its rows of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from asyncspec.backend.hf.cache import TreeCache
from asyncspec.backend.hf.draw import draw
from asyncspec.backend.hf.proposals import best_successors, log_probs_of
from asyncspec.backend.slot_tokens import SlotTokens
from asyncspec.jobs import Forward, Judged
from asyncspec.sampling import Sampling
from asyncspec_protocol.limits import LEAST_LOG_PROB

Output = torch.Tensor | tuple[int, ...] | Judged
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

    def judge(self, job: Forward, logits: torch.Tensor) -> tuple[int, ...] | Judged:
        """The tokens that are drawn from logits [len(job.judge), vocab], and the likeliest ones
        where they are wanted."""
        if not job.judge:
            return ()
        judged = [job.rows[row] for row in job.judge]
        new = [row.position + 1 for row in judged]
        if (seen := self.tokens) is None:
            tokens = draw(logits, new, self.sampling)
        else:
            tokens = draw(logits, new, self.sampling, seen.counts, map(seen.own, judged))
        if not self.tops and not self.log_probs:
            return tokens
        best = best_successors(logits, self.tops) if self.tops else []
        return Judged(
            tokens,
            likely=tuple((tuple(t), _finite(p)) for t, p in best),
            drawn=_finite(log_probs_of(logits, tokens)) if self.log_probs else (),
        )

    def result(self, output: Output, taps: Sequence[torch.Tensor]) -> Output:
        """What a pass gives, with the tapped hidden states [n, H] of its rows, low to high."""
        if isinstance(output, tuple):
            return Judged(output, torch.cat(list(taps), dim=1)) if self.features else output
        if isinstance(output, Judged):
            features = torch.cat(list(taps), dim=1) if self.features else None
            return replace(output, features=features)
        return torch.stack([output, *taps], dim=1) if taps else output


def _finite(log_probs: Sequence[float]) -> tuple[float, ...]:
    """Log-probabilities as they may travel: of a logit that is no number, as good as impossible."""
    return tuple([p if p >= LEAST_LOG_PROB else LEAST_LOG_PROB for p in log_probs])
