"""Every crowd under every policy: a plan, and greedy batching with the best of some lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from tools.bench.dipsd.machines.cases import Case
from tools.bench.dipsd.machines.crowd import Crowd, Ran
from tools.bench.growth.timing import no_collector
from tools.bench.limits.progress import Tick

USERS, STAGES, TOKENS = (4, 16, 64), (1, 2), 300
LENGTHS = (2, 3, 4, 6, 8)
"""Of drafts, where nothing is planned."""

CHAIN = "chain"
VARIANTS = {CHAIN: ""}
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


def measure(
    tick: Tick,
    *,
    users: Iterable[int] = USERS,
    stages: Sequence[int] = STAGES,
    cases: Sequence[Case],
    variants: Sequence[str] = (CHAIN,),
    tokens: int = TOKENS,
) -> list[Compared]:
    """All crowds. Raises ``WrongText``."""
    found = []
    for count in users:
        for cut in stages:
            for case in cases:
                for variant in variants:
                    found.append(compare(case, count, cut, variant, tokens))
                    tick()
    return found


def compare(
    case: Case, users: int, stages: int, variant: str = CHAIN, tokens: int = TOKENS
) -> Compared:
    """One crowd. Raises ``WrongText``."""
    more = VARIANTS[variant]
    with no_collector():
        greedy = {
            length: Crowd(case, users, stages, _named(f"length={length},plan=false", more), tokens)
            .run()
            .tokens_per_second
            for length in LENGTHS
        }
        planned = Crowd(case, users, stages, _named(more), tokens).run()
    return Compared(users, stages, case.name, variant, greedy, planned)


def _named(*parameters: str) -> str:
    given = ",".join(filter(None, parameters))
    return f"dip-sd:{given}" if given else "dip-sd"
