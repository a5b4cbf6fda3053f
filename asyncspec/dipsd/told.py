"""What draft nodes and stages tell, as a deployment that can be planned for. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncspec.dipsd.decide import Planning, bounded, measured
from asyncspec.dipsd.model import User
from asyncspec.dipsd.noise import Deviations, Noise
from asyncspec_protocol.messages import Rates

Stages = Sequence[tuple[float, float, float]]
"""Of each: (seconds of a pass, seconds of each of its rows, relative deviation)."""


def question(
    told: Sequence[Rates], stages: Stages, names: Sequence[str] = (), batch_rows: int = 0
) -> Planning:
    """What is to be planned for users of whom that is told, named by their sessions or as given,
    with passes of at most ``batch_rows`` rows (0: of any number).

    Lengths are planned for cautious chances, and what they bring is forecast by the mean ones.
    """
    names = names or [str(rates.session) for rates in told]
    users = [_user(name, rates) for name, rates in zip(names, told, strict=True)]
    deviations = Deviations(
        drafts=tuple([rates.jitter for rates in told]),
        links=tuple(map(_link_jitter, told)),
        passes=tuple([jitter for _, _, jitter in stages]),
    )
    # Nodes from before there was a mean tell the cautious chance alone.
    alphas = tuple([max(rates.alpha, rates.mean) for rates in told])
    passes = [(1000 * fixed, 1000 * row) for fixed, row, _ in stages]
    return Planning(
        tuple([rates.session for rates in told]),
        measured(users, passes, batch_rows),
        Noise(alphas=alphas, deviations=deviations),
    )


def _user(name: str, rates: Rates) -> User:
    return User(
        name,
        rates.alpha,
        0,
        bounded(1000 * rates.token_seconds),
        bounded(1000 * (rates.call_seconds + rates.link_seconds)),
    )


def _link_jitter(rates: Rates) -> float:
    """The relative deviation of what a round takes whatever its length: the links, and the call of
    the source."""
    whole = rates.call_seconds + rates.link_seconds
    if not 0 < whole < math.inf:
        return 0.0
    links = rates.link_jitter * (rates.link_seconds / whole)
    return math.hypot(links, rates.jitter * (rates.call_seconds / whole))
