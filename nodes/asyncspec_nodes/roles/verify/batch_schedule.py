"""Who is verified together, in which order: a plan at run time (DiP-SD), on the first stage.

Batches go round and round. A batch's pass starts when every member of it has its segment here, or
at a deadline; who is not here then is put aside and served as if there were no plan, until it has
kept time for a while, and for twice as long after every further offence. So whoever vanishes,
trickles or is slower than it says costs the others one bounded wait, and fewer and fewer of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.dipsd.brought import Comparison
from asyncspec.dipsd.decide import Decision, Planning
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import PassTimes, Rates

ROTA = "rota"
"""The deadline of the batch whose turn it is."""

PATIENCE = 1.5
"""Periods of the plan that a batch has from one of its passes to the next."""

LEAST = 0.5
"""Periods it has at least when its turn has come."""

STANDS = 4.0
"""Periods a plan stands at least: longer than any batch waits for its first pass."""

PROOF = 8
"""Segments in time after which somebody who was put aside is planned with again."""

MAX_PROOF = 1024


class Offence(Struct, frozen=True):
    """Somebody was not in time. ``proof`` segments in a row, each within ``seconds`` of the one
    before, make up for it."""

    proof: int
    seconds: float
    # When the last segment came, and how many were in time.
    last: float
    good: int = 0
    aside: bool = True


class Progress(Struct, frozen=True):
    """When a session's last segment came, and how long its committed path was then."""

    at: float
    committed: int


class Rota(Struct, frozen=True):
    """What is planned and what a plan is made of. Mappings are never changed in place."""

    # Sessions that take part, and what their draft nodes measure.
    members: Mapping[SessionId, Rates] = {}
    # Of the later stages, by the draft node that passes it on.
    tables: Mapping[Rank, Mapping[Rank, PassTimes]] = {}
    offences: Mapping[SessionId, Offence] = {}
    # Something that a plan is made of has changed since one was asked for.
    stale: bool = False
    # What is being decided, and what was decided last.
    asked: Planning | None = None
    basis: Planning | None = None
    decision: Decision | None = None
    version: int = 0
    # Lengths of drafts that were told.
    lengths: Mapping[SessionId, int] = {}
    # Empty: there is no plan, whoever is ready is verified.
    batches: tuple[tuple[SessionId, ...], ...] = ()
    # When each batch's last pass started; whose turn it is; seconds of a cycle by the plan.
    started: tuple[float, ...] = ()
    turn: int = 0
    # Those of the current batch that have had their pass: not all of it fitted in one.
    had: frozenset[SessionId] = frozenset()
    period: float = 0.0
    # Until then a plan stands: whoever could have it changed at will would move every deadline.
    stands: float = 0.0
    # What plans bring next to greedy batching; for whom they have failed last, and from when on
    # they may be tried; what greedy batching is forecast to bring each user, in tokens a second;
    # how far everybody's committed path has come.
    comparison: Comparison = Comparison()
    failed: Planning | None = None
    opens: float = 0.0
    forecast: Mapping[SessionId, float] = {}
    progress: Mapping[SessionId, Progress] = {}

    @property
    def current(self) -> tuple[SessionId, ...]:
        """The batch whose turn it is; nobody where there is no plan."""
        return self.batches[self.turn] if self.batches else ()

    @property
    def deadline_from(self) -> float:
        """From when on the current batch's patience runs."""
        return self.started[self.turn] + PATIENCE * self.period

    def standing(self, now: float) -> bool:
        """Whether the last decision stands: a plan, or greedy batching for the same users."""
        if now >= self.stands or self.basis is None:
            return False
        return bool(self.batches) or self.basis.sessions == planned_with(self)

    def rested(self, now: float) -> bool:
        """Whether a plan is kept from use that may be tried now."""
        decision = self.decision
        if decision is None or not decision.groups or self.batches or not self.forecast:
            return False
        return self.comparison.tried is None and now >= self.opens

    def held(self, waiting: Collection[SessionId]) -> Collection[SessionId]:
        """Of the sessions with a segment here those whose turn is not yet."""
        if not self.batches:
            return ()
        current = self.current
        ready = all(session in waiting or session in self.had for session in current)
        return {s for batch in self.batches if not (ready and batch is current) for s in batch}


def planned_with(rota: Rota) -> tuple[SessionId, ...]:
    """Those of whom enough is known and who keep time."""
    aside = {session for session, offence in rota.offences.items() if offence.aside}
    return tuple(s for s in sorted(rota.members) if rota.members[s].rounds and s not in aside)


def without(rota: Rota, gone: Collection[SessionId]) -> Rota:
    """The rota when some are not waited for any more. The turn stays with its batch, or goes to the
    next one where nobody of it is left to be served."""
    had = rota.had.difference(gone)
    served = bool(had) and had.issuperset(s for s in rota.current if s not in gone)
    batches: list[tuple[SessionId, ...]] = []
    started: list[float] = []
    turn = 0
    for n, batch in enumerate(rota.batches):
        left = tuple(session for session in batch if session not in gone)
        if n == rota.turn:
            turn = len(batches) + served
        if left:
            batches.append(left)
            started.append(rota.started[n])
    return replace(
        rota,
        batches=tuple(batches),
        started=tuple(started),
        turn=turn % len(batches) if batches else 0,
        had=frozenset() if served else had,
    )


def passed(rota: Rota, now: float) -> Rota:
    """The current batch is in a pass that starts now: the next one's turn."""
    started = tuple(now if n == rota.turn else at for n, at in enumerate(rota.started))
    turn = (rota.turn + 1) % len(rota.batches)
    return replace(rota, started=started, turn=turn, had=frozenset())


def late(rota: Rota, absent: Collection[SessionId], now: float) -> Rota:
    """The deadline has come and some are not here."""
    offences = dict(rota.offences)
    for session in absent:
        old = offences.get(session)
        proof = PROOF if old is None else min(MAX_PROOF, 2 * old.proof)
        offences[session] = Offence(proof, PATIENCE * rota.period, now)
    return replace(without(rota, absent), offences=offences, stale=True)


def came(rota: Rota, session: SessionId, now: float) -> Rota:
    """A segment of somebody has come, maybe of one who was put aside."""
    offence = rota.offences.get(session)
    if offence is None or not offence.aside:
        return rota
    good = offence.good + 1 if now - offence.last <= offence.seconds else 0
    aside = good < offence.proof
    offence = replace(offence, last=now, good=good, aside=aside)
    offences = {**rota.offences, session: offence}
    return replace(rota, offences=offences, stale=rota.stale or not aside)


def forget(rota: Rota, gone: Sequence[SessionId]) -> Rota:
    """Sessions are over."""
    left = {k: v for k, v in rota.members.items() if k not in gone}
    offences = {k: v for k, v in rota.offences.items() if k not in gone}
    forecast = {k: v for k, v in rota.forecast.items() if k not in gone}
    progress = {k: v for k, v in rota.progress.items() if k not in gone}
    lengths = {k: v for k, v in rota.lengths.items() if k not in gone}
    return replace(
        without(rota, gone),
        members=left,
        offences=offences,
        forecast=forecast,
        progress=progress,
        lengths=lengths,
        stale=True,
    )
