"""A crowd: users with a draft node each, on one pipeline of the real machines."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from asyncspec.core.machine import Effect, Emit, Finish, Input, Request, Submitted, TaskDone
from asyncspec.core.rng import uniform
from asyncspec.core.sampling import Sampling
from asyncspec.planning import Decision
from asyncspec.sim.world import World
from asyncspec_nodes.plugins.simulation.cluster import (
    MAX_STEPS,
    Setting,
    check_text,
    connect,
    draft_actor,
    stage_actor,
)
from asyncspec_nodes.roles.tasks import TASKS
from asyncspec_protocol.ids import Rank, draft_rank
from tools.bench.dipsd.machines.cases import FIXED, ROW, Case
from tools.bench.dipsd.machines.cost import CrowdCost

PROMPT = 16
WARM = 0.4
"""Share of the time until the first user is done that is start-up."""

PLANNING = 1 / 64
"""Seconds that planning takes, for each user."""

VISITS = 4
"""How often a user who comes and goes asks."""


class Ran(Struct, frozen=True):
    """What a policy made of a crowd; every text was the sequential decoder's."""

    policy: str
    # Of all users together, after the start and while all of them are at it.
    tokens_per_second: float
    # What the plans that were in force then had forecast, and the share of that time in which users
    # were verified by one; None where nothing is planned.
    forecast: float | None
    planned: float


class Crowd:
    """One world, one policy."""

    def __init__(self, case: Case, users: int, stages: int, policy: str, tokens: int) -> None:
        self.policy = policy
        cost = CrowdCost(case.people(users), FIXED / stages, ROW / stages, case.sigma)
        self.setting = Setting(case.language(PROMPT), stages=stages, batch_rows=4096)
        ranks = [draft_rank(number) for number in range(users)]
        actors = {rank: draft_actor(self.setting, rank=rank) for rank in ranks}
        for number in range(1, stages + 1):
            actors[Rank(number)] = stage_actor(self.setting, Rank(number))
        self.world = World(actors, cost, tasks=TASKS, whole_levels=True)
        connect(self.world, stages, ranks)
        self.world.task_seconds = PLANNING * users
        self.world.watch = self._watch
        # What each user is still to ask: after how many seconds, and for how many tokens.
        self.wishes = [_wishes(case, user, tokens) for user in range(users)]
        self.asked: list[tuple[int, Request]] = []
        # When tokens came, and how many; forecasts, and whether they were of a plan.
        self.given: list[tuple[float, int]] = []
        self.forecasts: list[tuple[float, float, bool]] = []
        # When the first of the users was done.
        self.end = 0.0

    def run(self) -> Ran:
        """Until all have been answered. Raises ``WrongText``."""
        for user in range(len(self.wishes)):
            self._next(user)
        self.world.run(most_steps=MAX_STEPS)
        for _, request in self.asked:
            found = self.world.tokens[request.request]
            check_text(self.setting.language, request, found)
        start, end = WARM * self.end, self.end
        tokens = sum(n for at, n in self.given if start < at <= end)
        return Ran(self.policy, tokens / (end - start), *self._forecast(start, end))

    def _next(self, user: int) -> None:
        if self.wishes[user]:
            pause, tokens = self.wishes[user].pop(0)
            self.world.at(self.world.now + pause, self._ask, user, tokens)
        elif not self.end:
            self.end = self.world.now

    def _ask(self, user: int, tokens: int) -> None:
        number = len(self.asked)
        request = Request(
            request=number,
            prompt=self.setting.language.prompt(number, PROMPT),
            max_new_tokens=tokens,
            sampling=Sampling(),
            stop_tokens=frozenset(),
            policy=self.policy,
        )
        self.asked.append((user, request))
        self.world.feed(draft_rank(user), Submitted(request))

    def _watch(self, rank: Rank, event: Input, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                self.given.append((self.world.now, len(effect.tokens)))
            elif isinstance(effect, Finish):
                self._next(self.asked[effect.request][0])
        if isinstance(event, TaskDone) and isinstance(found := event.result, Decision):
            forecast = found.planned if found.groups else found.greedy
            self.forecasts.append((self.world.now, forecast, bool(found.groups)))

    def _forecast(self, start: float, end: float) -> tuple[float | None, float]:
        """The mean over a time, and the share of it with a plan."""
        reported = [one for one in self.forecasts if one[0] < end]
        if not reported:
            return None, 0.0
        ends = [*(at for at, _, _ in reported[1:]), end]
        lasting = [
            max(0.0, until - max(at, start))
            for (at, _, _), until in zip(reported, ends, strict=True)
        ]
        whole = sum(lasting)
        mean = (
            sum(s * forecast for s, (_, forecast, _) in zip(lasting, reported, strict=True)) / whole
        )
        return mean, sum(s for s, (_, _, one) in zip(lasting, reported, strict=True) if one) / whole


def _wishes(case: Case, user: int, tokens: int) -> list[tuple[float, int]]:
    if not case.churn:
        return [(0.0, tokens)]
    drawn = [uniform(user, visit, 7) for visit in range(2 * VISITS)]
    return [
        (4.0 * drawn[2 * visit], max(8, round(tokens * (0.25 + 0.5 * drawn[2 * visit + 1]))))
        for visit in range(VISITS)
    ]
