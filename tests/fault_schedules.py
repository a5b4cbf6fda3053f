"""Schedules of requests and faults as plain data: drawn, run, made smaller, written and read.

A schedule is a JSON object, the same on every machine. ``run`` raises where a law is broken;
``shrunk`` finds a small schedule that breaks the same law.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from asyncspec.core.machine import Finish, Request
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.toy.model import ToyModel
from asyncspec_protocol.clients import BREAKS
from asyncspec_protocol.ids import Rank, draft_rank, is_draft
from asyncspec_protocol.sampling import UNCONSTRAINED, Constraint
from cluster import Cluster, ask
from fault_world import Fault, FaultyCosts, FaultyWorld
from languages import EOS, LANGUAGES
from laws import FEATURES, SMALL, check_answer, check_empty, watch_invariants

MOST_STEPS = 60_000
"""Steps of all machines; most runs take some hundreds."""


class Ask(Struct, frozen=True, omit_defaults=True):
    """A request, of which draft node, and when."""

    request: Request
    draft: int = 0
    when: int = 0


class Schedule(Struct, frozen=True, omit_defaults=True):
    """A cluster, its requests and what goes wrong. Fields as those of ``Cluster``."""

    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...] = ()
    stages: int = 1
    drafts: int = 1
    # Durations of passes, drafts and messages, used round and round.
    delays: tuple[int, ...] = (1,)
    model: int = 0
    top: float = 0.7
    window: int = 2
    batch_rows: int = 64
    prefill_rows: int = 4
    max_sessions: int = 3
    min_common_prefix: int = 1000
    slots: int = 0
    source_slots: int = 0
    features: tuple[int, ...] = ()
    apart: bool = False
    # How long requests wait for a broken pipeline, and the breaks in a row that end one; 0: any.
    rejoin: int = 0
    breaks: int = 0

    @property
    def bound(self) -> float:
        """Virtual time in which all must have ended: what the requests may take when they are
        served one by one, and what each fault may cost."""
        tokens = sum(a.request.max_new_tokens + len(a.request.prompt) for a in self.asks)
        work = 6.0 * self.stages * (1 + max(self.delays)) * tokens
        faults = sum(f.seconds * (1 + f.factor) + sum(f.noticed) + 60 for f in self.faults)
        return max((a.when for a in self.asks), default=0) + work * (1 + len(self.faults)) + faults


def cluster_of(schedule: Schedule) -> Cluster:
    """The schedule's cluster; its requests come and its faults strike when it runs."""
    s = schedule
    return Cluster(
        FaultyCosts(list(s.delays)),
        stages=s.stages,
        drafts=s.drafts,
        model=ToyModel(vocab=8, seed=s.model),
        top=s.top,
        policies=SMALL,
        window=s.window,
        batch_rows=s.batch_rows,
        slots=s.slots * (s.drafts + (s.drafts > 1)),
        source_slots=s.source_slots,
        min_common_prefix=s.min_common_prefix,
        prefill_rows=s.prefill_rows,
        max_sessions=s.max_sessions,
        features=s.features,
        apart=s.apart,
        rejoin_seconds=s.rejoin or 1e9,
        max_breaks=s.breaks or 10**9,
        world=FaultyWorld,
    )


class Run(Struct):
    """A schedule that runs."""

    schedule: Schedule
    cluster: Cluster
    # Requests that were made, by number, and those whose draft node was killed since.
    asked: dict[int, Ask] = field(default_factory=dict)
    doomed: set[int] = field(default_factory=set)

    @property
    def world(self) -> FaultyWorld:
        world = self.cluster.world
        assert isinstance(world, FaultyWorld)
        return world

    def submit(self, one: Ask) -> None:
        self.asked[one.request.request] = one
        self.cluster.submit(one.request, draft_rank(one.draft))

    def killed(self, rank: Rank) -> None:
        """What a draft node was asked ends with it."""
        if is_draft(rank):
            mine = {n for n, one in self.asked.items() if draft_rank(one.draft) == rank}
            self.doomed |= mine - self.world.finished.keys()

    def check(self) -> None:
        """Every answer is the sequential decoder's, as far as it had to come; nothing is left."""
        finished, ended = self.world.finished, self.world.ended
        for number, one in self.asked.items():
            reported, expected = tuple(self.world.tokens.get(number, ())), self.expected(one)
            assert reported == expected[: len(reported)], (
                f"request {number}: {reported}, not {expected}"
            )
            if number in self.doomed:
                continue
            finish = finished[number]
            check_stats(finish.stats)
            if finish.reason == "cancelled":
                assert any(f.kind == "cancel" and f.peer == number for f in self.schedule.faults)
            elif finish.reason == "error":
                self.check_error(finish)
            elif finish.reason == "stop" and finish.stats["new_tokens"] == ended.get(number):
                assert len(reported) >= ended[number]
            else:
                check_answer(self.cluster, one.request)
        check_empty(self.cluster)
        self.check_links()

    def check_error(self, finish: Finish) -> None:
        """Only a pipeline that was away too long, or broke too often, ends a request early."""
        if finish.code:
            assert finish.code == BREAKS
            assert 0 < self.schedule.breaks <= finish.stats["sessions"]
            assert len(self.world.broken) >= self.schedule.breaks
        else:
            assert self.schedule.rejoin
            assert finish.detail.startswith("the pipeline is not complete: ")

    def expected(self, one: Ask) -> tuple[int, ...]:
        return self.cluster.expected(one.request)

    def check_links(self) -> None:
        """All links are back, with credit for a segment, and nobody was forgotten."""
        s, cluster = self.schedule, self.cluster
        source = cluster.config.source
        links = {(r, Rank(k)) for r in cluster.drafts for k in range(1, s.stages + 1)}
        links |= {(Rank(k), Rank(k + 1)) for k in range(1, s.stages)}
        links |= {(r, source) for r in cluster.drafts if source is not None}
        assert self.world.joined.keys() == links | {(b, a) for a, b in links}
        for rank in cluster.drafts:
            state = cluster.state(rank)
            assert state.up
            assert state.allowed > state.sent
            assert not state.break_echoes


def check_stats(stats: dict[str, float]) -> None:
    """No counter of a request is negative, infinite or more than all of what it is a part of."""
    assert all(math.isfinite(value) and value >= 0 for value in stats.values()), stats
    assert stats["hits"] + stats["misses"] <= stats["new_tokens"]
    assert stats["dead_rows"] <= stats["rows"]
    assert stats["new_tokens"] == 0 or stats["sessions"] >= 1


def run(schedule: Schedule) -> Run:
    """Run a schedule to its end. Raises where a law is broken."""
    cluster = cluster_of(schedule)
    running = Run(schedule, cluster)
    world = running.world
    watch_invariants(cluster)
    world.killed = running.killed
    world.expect(schedule.faults, cluster.node)
    for one in schedule.asks:
        world.at(one.when, running.submit, one)
    world.run(until=schedule.bound, most_steps=MOST_STEPS)
    running.check()
    return running


def drawn(seed: int) -> Schedule:
    """The schedule of a number."""
    random = Random(seed)
    pick, number = random.choice, random.randint
    stages = pick((1, 2, 2, 2, 3, 3, 4))
    drafts = pick((1, 1, 1, 2, 2, 3))
    sessions = pick((1, 2, 2, 3, 3, 3)) if random.random() < 0.95 else 12
    asks = tuple(_ask(random, n, drafts) for n in range(sessions))
    features = pick(FEATURES)
    schedule = Schedule(
        asks,
        stages=stages,
        drafts=drafts,
        delays=tuple(number(0, pick((1, 3, 9))) for _ in range(number(1, 20))),
        model=number(0, 50),
        top=pick((0.0, 0.4, 0.7, 0.97)),
        window=number(1, 3),
        batch_rows=pick((1, 4, 9, 64)),
        prefill_rows=number(1, 5),
        max_sessions=number(1, max(4, sessions)),
        min_common_prefix=pick((1, 3, 1000)),
        slots=pick((0, 128, 250)),
        source_slots=pick((0, 0, 128, 250)),
        features=features,
        apart=random.random() < 0.4,
        rejoin=pick((0, 0, 0, 15)),
        breaks=pick((0, 0, 0, 2)),
    )
    faults: list[Fault] = []
    for _ in range(pick((0, 1, 1, 2, 2, 3, 4, 6))):
        fault = _fault(random, schedule)
        if faults and fault.kind not in OF_USERS and random.random() < 0.25:  # soon after the last
            fault = replace(fault, rank=faults[-1].rank, at=faults[-1].at + number(0, 3))
        faults.append(fault)
    return replace(schedule, faults=tuple(faults))


PROMPT = (1, 2, 3, 4, 5, 6, 7, 0, 1)


def _ask(random: Random, number: int, drafts: int) -> Ask:
    pick = random.choice
    length = random.randint(1, 9)
    prompt = PROMPT[:length]  # often another one's begins with it
    if random.random() < 0.4:
        prompt = tuple(random.randrange(8) for _ in range(length))
    how = _sampling(random)
    stop = pick((frozenset(), frozenset(), frozenset({3}), frozenset({0, 5})))
    request = ask(
        number,
        prompt=prompt,
        max_new_tokens=random.randint(1, 12),
        sampling=how,
        stop_tokens=frozenset({EOS}) if how.constraint.grammar else stop,
        policy=pick(POLICIES),
        tenant=pick(("", "", "one", "other")),
    )
    return Ask(request, random.randrange(drafts), pick((0, random.randint(0, 60))))


POLICIES = (*sorted(SMALL.keys() - {"flow"}) * 2, "flow")
"""A run under "flow" costs as much as three others."""


def _sampling(random: Random) -> Sampling:
    pick, how = random.choice, Sampling()
    if random.random() < 0.6:
        how = Sampling(
            temperature=pick((0.2, 0.5, 1.0)),
            top_k=pick((0, 0, 3)),
            top_p=pick((1.0, 1.0, 0.8)),
            min_p=pick((0.0, 0.0, 0.2)),
            seed=random.getrandbits(64),
        )
    if random.random() < 0.3:
        how = replace(
            how,
            repetition_penalty=pick((1.0, 0.7, 1.3)),
            presence_penalty=pick((0.0, -0.5, 0.6)),
            frequency_penalty=pick((0.0, -0.3, 1.5)),
        )
    if random.random() < 0.2:
        grammar = pick(("", *(language.grammar for language in LANGUAGES)))
        bias = pick(((), ((2, 3.5), (5, -100.0))))
        constraint = Constraint(grammar, bias, pick((0, 0, 5)), (3, EOS))
        how = replace(how, constraint=constraint)
    return how


OF_USERS = ("cancel", "end")
KINDS = ("kill", "kill", "cut", "cut", "cut", "stop", "slow", "lag", *OF_USERS)


def _fault(random: Random, schedule: Schedule) -> Fault:
    pick, number = random.choice, random.randint
    kind, drafts = pick(KINDS), [draft_rank(n) for n in range(schedule.drafts)]
    others = [Rank(k) for k in range(1, schedule.stages + 1 + schedule.apart)]
    rank = pick(others) if random.random() < 0.6 else pick(drafts)
    peer = int(pick([*others, *drafts]))
    if kind in OF_USERS:
        one = pick(schedule.asks)
        rank, peer = draft_rank(one.draft), one.request.request
    return Fault(
        kind,
        rank,
        # Soon after the links are up, in a prompt, or late.
        number(0, pick((8, 40, 120, 250))),
        peer,
        number(0, pick((4, 30))),
        (number(0, pick((0, 9))), number(0, pick((0, 9)))),
        lost=random.random() < 0.7,
        flaps=pick((0, 0, 0, 1, 2)),
        factor=number(1, 6),
    )


def encoded(schedule: Schedule) -> str:
    """A line of JSON."""
    return msgspec.json.encode(schedule, order="deterministic").decode()


def decoded(text: str | bytes) -> Schedule:
    """The schedule of a line of JSON."""
    return msgspec.json.decode(text, type=Schedule)


def failure(schedule: Schedule) -> BaseException | None:
    """The error that running a schedule ends with, if one does."""
    try:
        run(schedule)
    except Exception as error:
        return error
    return None


def shrunk(schedule: Schedule, most_runs: int = 400) -> Schedule:
    """A smaller schedule that fails with an error of the same type: greedily, as long as any of
    ``smaller`` does."""
    kind = type(failure(schedule))
    runs, found = 0, True
    while found and runs < most_runs:
        found = False
        for candidate in smaller(schedule):
            runs += 1
            if type(failure(candidate)) is kind:
                schedule, found = candidate, True
                break
            if runs >= most_runs:
                break
    return schedule


def smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that are simpler in one respect, those that leave out most first."""
    s = schedule
    for size in (8, 4, 2, 1):
        for start in range(0, len(s.faults), size):
            if size <= len(s.faults):
                yield replace(s, faults=s.faults[:start] + s.faults[start + size :])
    for i in range(len(s.asks)):
        yield replace(s, asks=s.asks[:i] + s.asks[i + 1 :])
    last = draft_rank(s.drafts - 1)
    if s.drafts > 1 and not any(draft_rank(a.draft) == last for a in s.asks):
        yield replace(s, drafts=s.drafts - 1)
    if s.stages > 1:
        yield replace(s, stages=s.stages - 1)
    for name in SIMPLE:
        if getattr(s, name) != (value := _default(Schedule, name)):
            yield replace(s, **{name: value})
    for i, one in enumerate(s.asks):
        for ask_ in _smaller_ask(one):
            yield replace(s, asks=(*s.asks[:i], ask_, *s.asks[i + 1 :]))
    for i, fault in enumerate(s.faults):
        for struck in _smaller_fault(fault):
            yield replace(s, faults=(*s.faults[:i], struck, *s.faults[i + 1 :]))


SIMPLE = (
    *("delays", "features", "apart", "slots", "source_slots", "min_common_prefix", "batch_rows"),
    *("window", "prefill_rows", "max_sessions", "model", "top", "rejoin", "breaks"),
)


def _smaller_ask(one: Ask) -> Iterator[Ask]:
    request, how = one.request, one.request.sampling
    if one.when:
        yield replace(one, when=0)
    if one.draft:
        yield replace(one, draft=0)
    plain = {
        "sampling": (Sampling(), replace(how, constraint=UNCONSTRAINED)),
        "stop_tokens": (frozenset(),),
        "policy": ("autoregressive", "chain"),
        "tenant": ("",),
        "prompt": (request.prompt[:1], request.prompt[:-1]),
        "max_new_tokens": (1, request.max_new_tokens // 2, request.max_new_tokens - 1),
    }
    for name, values in plain.items():
        before: Any = getattr(request, name)
        for value in values:
            simpler = name != "policy" or before not in values[: values.index(value) + 1]
            if value and value != before and simpler:
                yield replace(one, request=replace(request, **{name: value}))


def _smaller_fault(fault: Fault) -> Iterator[Fault]:
    for name in ("noticed", "lost", "flaps", "seconds", "factor"):
        if getattr(fault, name) != (value := _default(Fault, name)):
            yield replace(fault, **{name: value})
    for at in dict.fromkeys((0, fault.at // 2, fault.at - 1)):
        if 0 <= at < fault.at:
            yield replace(fault, at=at)


def _default(struct: type[Struct], name: str) -> Any:
    return next(f.default for f in msgspec.structs.fields(struct) if f.name == name)


def report(seed: int) -> str:
    """What a failing schedule's error says, with the small schedule to be kept as a test."""
    schedule = shrunk(drawn(seed))
    error = failure(schedule)
    return f"schedule {seed}: {type(error).__name__}: {error}\n{encoded(schedule)}"
