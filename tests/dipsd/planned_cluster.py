"""Users with devices of their own on one pipeline, virtual clock: what plans are tried on."""

from __future__ import annotations

from typing import Any

from asyncspec.core.machine import Effect, Emit, Input, Request, TaskDone
from asyncspec.planning import Decision
from asyncspec.plugins.toy.model import ToyModel
from asyncspec_nodes.roles.verify.batch_schedule import BatchSchedule
from asyncspec_protocol.ids import Rank, draft_rank
from cluster import Cluster, ask
from dipsd.crowd_cost import CrowdCost as Bench
from dipsd.crowd_cost import Person

__all__ = ["Bench", "Person", "Trial"]


class Trial:
    """One user a draft node, all of whom want ``tokens`` tokens."""

    def __init__(
        self,
        bench: Bench,
        *,
        stages: int = 1,
        tokens: int = 300,
        top: float = 0.8,
        policy: str = "dip-sd",
        batch_rows: int = 1024,
        **options: Any,
    ) -> None:
        self.bench = bench
        self.cluster = Cluster(
            bench,
            drafts=len(bench.people),
            stages=stages,
            top=top,
            batch_rows=batch_rows,
            model=ToyModel(vocab=50, seed=3),
            prefill_rows=64,
            **options,
        )
        self.tokens, self.policy = tokens, policy
        self.asked: list[Request] = []
        # (seconds, tokens) of everybody, and what was decided when.
        self.given: list[tuple[float, int]] = []
        self.decided: list[tuple[float, Decision]] = []
        self.cluster.world.watch = self.watch

    def watch(self, rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        now = self.cluster.world.now
        for effect in effects:
            if isinstance(effect, Emit):
                self.given.append((now, len(effect.tokens)))
        if isinstance(event, TaskDone) and isinstance(event.result, Decision):
            self.decided.append((now, event.result))

    def ask(self, who: int, tokens: int = 0) -> Request:
        prompt = tuple((7 * who + i) % 50 for i in range(6))
        request = ask(
            len(self.asked), prompt=prompt, max_new_tokens=tokens or self.tokens, policy=self.policy
        )
        self.asked.append(request)
        self.cluster.submit(request, draft_rank(who))
        return request

    def run(self) -> None:
        for who in range(len(self.bench.people)):
            self.ask(who)
        self.cluster.world.run(until=1e5)
        self.check()

    def check(self) -> None:
        """Every text is the sequential decoder's."""
        for request in self.asked:
            reported = tuple(self.cluster.world.tokens.get(request.request, ()))
            assert reported == self.cluster.expected(request), request.request

    @property
    def schedule(self) -> BatchSchedule:
        schedule: BatchSchedule = self.cluster.state(1).schedule
        return schedule

    def throughput(self, start: float, end: float) -> float:
        """Tokens a second of everybody between two moments."""
        return sum(n for at, n in self.given if start <= at < end) / (end - start)

    def first_end(self) -> float:
        """When the first answer is complete, in virtual seconds."""
        world = self.cluster.world
        return min(
            stats["queue_seconds"] + stats["first_token_seconds"] + stats["decode_seconds"]
            for stats in (finish.stats for finish in world.finished.values())
        )

    def steady(self) -> float:
        """Tokens a second of everybody, after a start and while all are served."""
        end = self.first_end()
        return self.throughput(0.4 * end, end)
