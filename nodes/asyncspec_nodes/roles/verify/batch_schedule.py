"""The batch schedule of a plan, as the first stage follows it.

Batches are verified in cyclic order. A batch's pass starts when all its sessions have a segment
here, or at its deadline. A session that misses the deadline is suspended: it is served as if there
were no plan, until a number of its segments in a row have been in time; the number doubles with
every further miss. So a late session costs the others one bounded wait, with exponential backoff.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.machine import SetTimer
from asyncspec.planning import Decision, PlanRequest
from asyncspec_nodes.roles.verify.plan_comparison import PlanComparison
from asyncspec_protocol.ids import Rank, SessionId, owner
from asyncspec_protocol.messages import PassTimes, Rates

BATCH_DEADLINE = "batch deadline"
"""The timer of the current batch."""

DEADLINE_PERIODS = 1.5
"""From a batch's pass to its next deadline, in periods of the plan: half a period of jitter."""

MIN_DEADLINE_PERIODS = 0.5
"""Least time from a batch becoming current to its deadline: members may await verdicts."""

PROBATION, MAX_PROBATION = 8, 1024
"""Segments in time that end a first suspension; and any: the number doubles with each."""


class Suspension(Struct, frozen=True):
    """A session has missed a deadline. ``required`` segments in a row, each within ``seconds`` of
    the one before, end it."""

    required: int
    seconds: float
    # When the last segment came, and how many in a row were in time.
    last: float
    in_time: int = 0
    # False: it is over, and only the number of segments is remembered.
    active: bool = True


class CommitProgress(Struct, frozen=True):
    """When a session's last segment came, and how many tokens were committed by then."""

    at: float
    committed: int


class BatchSchedule(Struct, frozen=True):
    """The plan in use and what it was made from. Mappings are never changed in place."""

    # Sessions that take part, and what their draft nodes measure.
    members: Mapping[SessionId, Rates] = {}
    # Pass times of the later stages, by the draft node that passes them on.
    pass_times: Mapping[Rank, Mapping[Rank, PassTimes]] = {}
    suspensions: Mapping[SessionId, Suspension] = {}
    # The planner's input has changed since a plan was last requested.
    stale: bool = False
    # The input of the planner that runs, and input and result of the one that ran last.
    requested: PlanRequest | None = None
    planned_for: PlanRequest | None = None
    decision: Decision | None = None
    version: int = 0
    # Draft lengths sent to the draft nodes.
    lengths: Mapping[SessionId, int] = {}
    # Empty: no plan is in use, and every ready session is verified (greedy batching).
    batches: tuple[tuple[SessionId, ...], ...] = ()
    # When each batch's last pass started; the current batch; seconds of a cycle by the plan.
    started: tuple[float, ...] = ()
    index: int = 0
    # Sessions of the current batch that have had their pass: not all of it fitted in one.
    served: frozenset[SessionId] = frozenset()
    period: float = 0.0
    # No new plan before: a draft node that could cause one at will would move every deadline.
    fixed_until: float = 0.0
    # Plans against greedy batching as measured; the input for which plans failed last, and when
    # they may be tried again; tokens a second that greedy batching is forecast to bring each
    # session; progress of every member.
    comparison: PlanComparison = PlanComparison()
    failed_for: PlanRequest | None = None
    retry_at: float = 0.0
    forecast: Mapping[SessionId, float] = {}
    progress: Mapping[SessionId, CommitProgress] = {}

    @property
    def current(self) -> tuple[SessionId, ...]:
        """The batch to be verified next; empty where no plan is in use."""
        return self.batches[self.index] if self.batches else ()

    @property
    def eligible(self) -> tuple[SessionId, ...]:
        """Measured members that are not suspended."""
        suspended = {session for session, one in self.suspensions.items() if one.active}
        measured = (session for session in sorted(self.members) if self.members[session].rounds)
        return tuple(session for session in measured if session not in suspended)

    def fixed(self, now: float) -> bool:
        """Whether the last decision is kept: a plan, or greedy batching for the same sessions."""
        if now >= self.fixed_until or self.planned_for is None:
            return False
        return bool(self.batches) or self.planned_for.sessions == self.eligible

    def retry_due(self, now: float) -> bool:
        """Whether a plan that is out of use after a failure may be tried again."""
        decision = self.decision
        if decision is None or not decision.groups or self.batches or not self.forecast:
            return False
        return self.comparison.tried is None and now >= self.retry_at

    def held(self, waiting: Collection[SessionId]) -> Collection[SessionId]:
        """Sessions of batches that are not current or not complete, given the ``waiting`` ones."""
        current = self.current
        ready = all(session in waiting or session in self.served for session in current)
        return {s for batch in self.batches if not (ready and batch is current) for s in batch}

    def deadline(self, now: float) -> SetTimer:
        """Set the timer of the batch that becomes the current one now."""
        if not self.batches:
            return SetTimer(BATCH_DEADLINE, None)
        due = self.started[self.index] + DEADLINE_PERIODS * self.period
        return SetTimer(BATCH_DEADLINE, max(due, now + MIN_DEADLINE_PERIODS * self.period))


def without(schedule: BatchSchedule, gone: Collection[SessionId]) -> BatchSchedule:
    """The schedule without some sessions; the current batch stays until all of it is served."""
    served = schedule.served.difference(gone)
    complete = bool(served) and served.issuperset(s for s in schedule.current if s not in gone)
    batches: list[tuple[SessionId, ...]] = []
    started: list[float] = []
    index = 0
    for n, batch in enumerate(schedule.batches):
        left = tuple(session for session in batch if session not in gone)
        if n == schedule.index:
            index = len(batches) + complete
        if left:
            batches.append(left)
            started.append(schedule.started[n])
    return replace(
        schedule,
        batches=tuple(batches),
        started=tuple(started),
        index=index % len(batches) if batches else 0,
        served=frozenset() if complete else served,
    )


def advance(schedule: BatchSchedule, now: float) -> BatchSchedule:
    """The current batch's pass starts: the next batch becomes the current one."""
    started = tuple(now if n == schedule.index else at for n, at in enumerate(schedule.started))
    index = (schedule.index + 1) % len(schedule.batches)
    return replace(schedule, started=started, index=index, served=frozenset())


def suspend(schedule: BatchSchedule, late: Collection[SessionId], now: float) -> BatchSchedule:
    """Suspend the sessions that have missed the deadline."""
    suspensions = dict(schedule.suspensions)
    for session in late:
        old = suspensions.get(session)
        required = PROBATION if old is None else min(MAX_PROBATION, 2 * old.required)
        suspensions[session] = Suspension(required, DEADLINE_PERIODS * schedule.period, now)
    return replace(without(schedule, late), suspensions=suspensions, stale=True)


def count_segment(schedule: BatchSchedule, session: SessionId, now: float) -> BatchSchedule:
    """A segment has come: of a suspended session, one in time or the first of a new row."""
    suspension = schedule.suspensions.get(session)
    if suspension is None or not suspension.active:
        return schedule
    in_time = suspension.in_time + 1 if now - suspension.last <= suspension.seconds else 0
    active = in_time < suspension.required
    suspension = replace(suspension, last=now, in_time=in_time, active=active)
    suspensions = {**schedule.suspensions, session: suspension}
    return replace(schedule, suspensions=suspensions, stale=schedule.stale or not active)


def drop(schedule: BatchSchedule, gone: Collection[SessionId]) -> BatchSchedule:
    """The schedule when sessions are over."""
    members = {k: v for k, v in schedule.members.items() if k not in gone}
    owners = set(map(owner, members))
    return replace(
        without(schedule, gone),
        members=members,
        pass_times={k: v for k, v in schedule.pass_times.items() if k in owners},
        suspensions={k: v for k, v in schedule.suspensions.items() if k not in gone},
        forecast={k: v for k, v in schedule.forecast.items() if k not in gone},
        progress={k: v for k, v in schedule.progress.items() if k not in gone},
        lengths={k: v for k, v in schedule.lengths.items() if k not in gone},
        stale=True,
    )
