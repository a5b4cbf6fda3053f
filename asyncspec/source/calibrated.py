"""A model's chances as they come true in a session.

Draft heads are underconfident, and along a path that adds up: a deep node whose path is sure ranks
behind unlikely ones near the root, so that the best nodes of a tree are shallow. A policy that
compares nodes of all depths asks for chances that hold (``Expand.calibrated``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from asyncspec.source.expand import Grower, Proposal, WrappedGrower
from asyncspec.source.mixture import Calibration, Path, settle


class FirstChoices(Struct, frozen=True):
    """How often a session's first choices came true beside what was stated, and by path those whose
    token is not known yet: their tokens and stated chances."""

    counts: Calibration = Calibration()
    pending: Mapping[Path, tuple[int, float]] = {}

    def advance(self, committed: Sequence[int]) -> FirstChoices:
        """After some tokens were committed."""
        if not self.pending:
            return self
        pending, settled = settle(self.pending, committed)
        counts = self.counts
        for (first, chance), token in settled:
            counts = counts.counted(chance, true=first == token)
        return FirstChoices(counts, pending)

    def corrected(self, proposal: Proposal) -> Proposal:
        """With the odds of the first choice as they came true, the others in proportion. Only
        upwards: it stays the first."""
        tokens, log_probs = proposal
        if not len(tokens):
            return proposal
        stated = math.exp(log_probs[0])
        chance = self.counts.corrected(stated)
        if chance <= stated:
            return proposal
        others = math.log((1.0 - chance) / (1.0 - stated))
        return tokens, [math.log(chance), *[one + others for one in log_probs[1:]]]


class Learner(Protocol):
    """A session of a source."""

    first_choices: FirstChoices


class CalibratedGrower(WrappedGrower):
    """A ``Grower`` whose proposals are corrected by what a session has learned."""

    def __init__(self, grower: Grower, session: Learner) -> None:
        super().__init__(grower)
        self._session = session

    def propose(self, nodes: Sequence[int], width: int) -> list[Proposal]:
        proposals, choices = self._grower.propose(nodes, width), self._session.first_choices
        news = {
            self._paths[node]: (tokens[0], math.exp(log_probs[0]))
            for node, (tokens, log_probs) in zip(nodes, proposals, strict=True)
            if len(tokens)
        }
        self._session.first_choices = FirstChoices(choices.counts, {**choices.pending, **news})
        return [choices.corrected(one) for one in proposals]
