"""What simulated users and their machines are: as the paper has them, and as they come."""

from __future__ import annotations

from msgspec import Struct

from asyncspec.plugins.dipsd.model import ALPHA
from asyncspec.sim.language import Language, Synthetic, harmonic
from asyncspec.source.expand import Proposal
from tools.bench.dipsd.machines.cost import Person

TOKEN, LINK = 0.0339, 0.0015
"""Seconds a drafted token on the paper's device, and of its link each way."""

FIXED, ROW = 0.0951, 0.000576
"""Seconds of a pass of the paper's verifier, and of each row of it after a prefix of 512."""

TURNS = 60
"""Tokens of an answer before what is drafted gets easier or harder, where it does."""


class Case(Struct, frozen=True):
    """Users, and what their machines do."""

    name: str
    # Devices are up to so many times as fast, and as slow, as the paper's.
    spread: float = 1.0
    # Relative deviation of drafts, links and passes.
    sigma: float = 0.0
    # Seconds each way of every fourth user's link.
    slow_link: float = LINK
    # The chance of a drafted token; from the ``TURNS``-th token of an answer on it is ``later``.
    alpha: float = ALPHA
    later: float = ALPHA
    # Users ask several times, with pauses between.
    churn: bool = False
    # Seconds a drafted token.
    token: float = TOKEN

    def people(self, users: int) -> list[Person]:
        """The users' devices and links."""
        last = max(1, users - 1)
        return [
            Person(
                self.token * self.spread ** (2 * m / last - 1),
                self.slow_link if m % 4 == 3 else LINK,
            )
            for m in range(users)
        ]

    def language(self, prompt: int) -> Language:
        """What the draft guesses of what the target says, after prompts of so many tokens."""
        first = Synthetic(harmonic(self.alpha))
        if self.later == self.alpha:
            return first
        return Turning(first, Synthetic(harmonic(self.later)), prompt + TURNS)


class Turning(Struct, frozen=True):
    """A text that from a position on is as hard to guess as another with the same words."""

    first: Synthetic
    later: Synthetic
    position: int

    def prompt(self, request: int, length: int) -> tuple[int, ...]:
        """See ``Language``."""
        return self.first.prompt(request, length)

    def longest(self, request: int) -> int | None:
        """See ``Language``."""
        return None

    def truth(self, path: int) -> int:
        """See ``Language``."""
        return self.first.truth(path)

    def propose(self, path: int, position: int, stale: int, width: int) -> Proposal:
        """See ``Language``."""
        which = self.first if position < self.position else self.later
        return which.propose(path, position, stale, width)


CASES = {
    case.name: case
    for case in (
        Case("equal"),
        Case("unequal", spread=4.0),
        Case("jitter", spread=4.0, sigma=0.2),
        Case("harder", spread=4.0, alpha=0.95, later=0.5),
        Case("easier", spread=4.0, alpha=0.5, later=0.95),
        Case("slow-links", spread=4.0, slow_link=0.05),
        Case("churn", spread=4.0, sigma=0.1, churn=True),
    )
}
"""By name."""
