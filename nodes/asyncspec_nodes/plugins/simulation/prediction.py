"""Tokens a second that a placement is predicted to bring: the real machines on the virtual clock,
with its passes and links."""

from __future__ import annotations

from msgspec import Struct

from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.placement.model import Placement
from asyncspec.placement.rate import PassShape
from asyncspec.sim.costs import ClusterCost, LinkCost
from asyncspec.sim.language import Synthetic, harmonic
from asyncspec_nodes.plugins.simulation.cluster import Setting, simulate

TOKENS = 192
"""Tokens of the simulated answer: rounds average out, and it takes seconds."""


class DraftModel(Struct, frozen=True):
    """The token source that a prediction is for."""

    # Chance that its first candidate is right, and the factor on it for every further level.
    top: float
    decay: float
    level_seconds: float


class Prediction(Struct, frozen=True):
    """Tokens a second of one answer."""

    plain: float
    # With the policy.
    policy: float


def predict(
    placement: Placement, policy: str, draft: DraftModel, shape: PassShape, row_bytes: int
) -> Prediction:
    """The speed of a greedy answer after a short prompt. ``row_bytes``: of hidden states."""
    seconds = [stage.seconds for stage in placement.stages]
    longest = max(seconds)
    count = len(seconds)
    cost = ClusterCost(
        stage=StageCost(longest, shape.plateau, longest * shape.row_share),
        slow={rank: one / longest for rank, one in enumerate(seconds, start=1)},
        draft=DraftCost(draft.level_seconds),
        wire=_mean_link(placement, row_bytes),
        width=max(1, row_bytes // 2),
    )
    setting = Setting(
        Synthetic(coverage=harmonic(draft.top), decay=draft.decay),
        cost,
        stages=count,
        tokens=TOKENS,
        prompt_tokens=8,
    )
    (times,) = simulate(setting, policy).times
    return Prediction(1 / placement.whole, (len(times) - 1) / max(1e-12, times[-1] - times[0]))


def _mean_link(placement: Placement, row_bytes: int) -> LinkCost:
    """What each link is like if all are equal: a row waits for the sum of their latencies, and
    keeps those between stages busy for as long in sum."""
    between, busy = len(placement.stages) - 1, placement.row_seconds
    latency = max(0.0, placement.link_seconds - busy) / (between + 2)
    return LinkCost(latency, between * row_bytes / busy if busy else 0.0)
