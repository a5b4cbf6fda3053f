"""Users with devices of their own on one pipeline, on the virtual clock: what plans are tried on.

A device is so many seconds a drafted token, a link so many each way; a pass takes a fixed time on
every stage and some for each row. Jitter is a function of the seed and of the moment's number.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from asyncspec.actor.machine import Effect, Emit, Input, Planned, Request
from asyncspec.backend.toy import ToyModel
from asyncspec.dipsd.decide import Decision
from asyncspec.dipsd.noise import DRAFT as DRAFTING
from asyncspec.dipsd.noise import LINK, VERIFY, Noise
from asyncspec.jobs import Batch, Forward, Job, drafts
from asyncspec_nodes.machines.verify.rota import Rota
from asyncspec_protocol.ids import Rank, draft_rank, is_draft
from asyncspec_protocol.messages import Message, Segment, Verdict
from cluster import Cluster, ask


class Person(Struct):
    """A user with a device; what it is may change while it runs."""

    token: float
    link: float = 0.0015


class Bench(Struct):
    """Costs of a cluster of such users."""

    people: list[Person]
    fixed: float = 0.095
    row: float = 0.0005
    sigma: float = 0.0
    seed: int = 1
    used: int = 0
    tokens: dict[int, list[float]] = field(default_factory=dict)

    def factor(self, kind: int) -> float:
        self.used += 1
        return Noise(self.sigma, self.seed).factor(kind, 0, self.used)

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        if not isinstance(message, Segment | Verdict):
            return 0.0
        rank = source if is_draft(source) else target
        if not is_draft(rank):
            return 0.0
        return self.people[number(rank)].link * self.factor(LINK)

    def device(self, rank: Rank, job: Job) -> float:
        if isinstance(job, Forward | Batch):
            return (self.fixed + self.row * job.row_count) * self.factor(VERIFY)
        if is_draft(rank) and drafts(job):
            depth = max(max(1, tree.depth) for tree in drafts(job))
            return self.people[number(rank)].token * depth * self.factor(DRAFTING)
        return 0.0


def number(rank: Rank) -> int:
    """Of a draft node."""
    return 0 if rank == 0 else rank - 1000


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
        **options: Any,
    ) -> None:
        self.bench = bench
        self.cluster = Cluster(
            bench,
            drafts=len(bench.people),
            stages=stages,
            top=top,
            batch_rows=1024,
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
        if isinstance(event, Planned):
            self.decided.append((now, event.decision))

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
            told = tuple(self.cluster.world.tokens.get(request.request, ()))
            assert told == self.cluster.expected(request), request.request

    @property
    def rota(self) -> Rota:
        rota: Rota = self.cluster.state(1).rota
        return rota

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
