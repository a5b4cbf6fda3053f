"""Every crowd under every policy: a plan, and greedy batching with the best of some lengths."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from tools.bench.collector import no_collector
from tools.bench.dipsd.machines.cases import Case
from tools.bench.dipsd.machines.crowd import Crowd, Ran
from tools.bench.limits.progress import Tick
from tools.bench.pool import as_done

USERS, STAGES, TOKENS = (4, 16, 64), (1, 2), 200
LENGTHS = (2, 3, 4, 6, 8)
"""Of drafts, where nothing is planned."""

CHAIN = "chain"
VARIANTS = {CHAIN: "", "ahead": "ahead=true", "tree": "width=2"}
"""How drafts are made: parameters of the policy, by name."""


class Compared(Struct, frozen=True):
    """One crowd with drafts of one kind: greedy batching by length, and what a plan made of it."""

    users: int
    stages: int
    case: str
    variant: str
    greedy: dict[int, float]
    planned: Ran

    @property
    def best_greedy(self) -> float:
        """Tokens a second of the best length, known only afterwards."""
        return max(self.greedy.values())

    @property
    def length(self) -> int:
        """That length."""
        return max(self.greedy, key=lambda length: self.greedy[length])

    @property
    def ratio(self) -> float:
        """A plan's tokens over those of the best greedy batching."""
        return self.planned.tokens_per_second / self.best_greedy


class Ask(Struct, frozen=True):
    """A crowd to be measured, with drafts of one kind."""

    case: Case
    users: int
    stages: int
    variant: str = CHAIN
    tokens: int = TOKENS


def measure(tick: Tick, asks: Sequence[Ask], jobs: int = 1) -> list[Compared]:
    """All crowds, in so many processes. Raises ``WrongText``."""
    found: dict[Ask, Compared] = {}
    # The largest first, or one of them is left over at the end.
    for ask, compared in as_done(jobs, compare, sorted(asks, key=lambda ask: -ask.users)):
        found[ask] = compared
        tick()
    return [found[ask] for ask in asks]


def compare(ask: Ask) -> Compared:
    """One crowd. Raises ``WrongText``."""
    more = VARIANTS[ask.variant]
    with no_collector():
        greedy = {
            length: _ran(ask, f"length={length},plan=false", more).tokens_per_second
            for length in LENGTHS
        }
        planned = _ran(ask, more)
    return Compared(ask.users, ask.stages, ask.case.name, ask.variant, greedy, planned)


def _ran(ask: Ask, *parameters: str) -> Ran:
    given = ",".join(filter(None, parameters))
    policy = f"dip-sd:{given}" if given else "dip-sd"
    return Crowd(ask.case, ask.users, ask.stages, policy, ask.tokens).run()
