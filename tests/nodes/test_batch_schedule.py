"""How a first stage follows a plan (DiP-SD) of batches that are too large for one pass."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.jobs import Batch
from asyncspec.core.machine import Computed, Input, LinkUp, Received, Send, SetTimer, TimerFired
from asyncspec_nodes.roles.verify.batch_schedule import BATCH_DEADLINE
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.ids import DRAFT, NO_PARENT, NodeId, Rank, SegmentId, SessionId, Version
from asyncspec_protocol.messages import Credit, Open, Rates, Segment

ROWS = 5
"""Of every segment."""

USERS = 5


class Stage:
    """The first of four, in the middle of a plan, whose passes take ``most`` rows."""

    def __init__(self, batches: Sequence[Sequence[int]], most: int, *, also: int = 0) -> None:
        self.machine = VerifyMachine(VerifyConfig(Rank(1), 1, 4, batch_rows=most))
        self.state, self.now, self.armed = self.machine.initial(), 0.0, True
        self.credit = 0
        self.sent = dict[int, int]()
        self.feed(LinkUp(DRAFT))
        members = [SessionId(s) for batch in batches for s in batch]
        for name in (*members, *map(SessionId, range(100, 100 + also))):
            self.feed(Received(DRAFT, Open(name, 1, 4096, 0, 0.0, 0, 1.0)))
        for name in members:
            self.feed(Received(DRAFT, Rates(name, 9, 0.5, 0.01, 0.0, 0.01)))
        plan = tuple(tuple(map(SessionId, batch)) for batch in batches)
        started = (0.0,) * len(plan)
        schedule = replace(self.state.schedule, batches=plan, started=started, period=1.0)
        self.state = replace(self.state, schedule=replace(schedule, stale=False, requested=None))

    def feed(self, event: Input) -> None:
        self.state, effects = self.machine.step(self.state, event, self.now)
        for effect in effects:
            if isinstance(effect, SetTimer) and effect.timer == BATCH_DEADLINE:
                self.armed = effect.at is not None
            if isinstance(effect, Send) and isinstance(effect.message, Credit):
                self.credit = effect.message.limit

    def comes(self, session: int) -> None:
        """Its next segment, unless one waits or there is no credit."""
        if session in self.waiting or sum(self.sent.values()) + len(self.sent) >= self.credit:
            return
        number = self.sent[session] = self.sent.get(session, -1) + 1
        ids = tuple(NodeId(ROWS * number + i) for i in range(ROWS))
        parents = (NodeId(ids[0] - 1) if number else NO_PARENT, *ids[:-1])
        name, applied = SessionId(session), Version(0)
        segment = Segment(name, SegmentId(number), applied, ids, parents, tokens=ids)
        self.feed(Received(DRAFT, segment))

    def over(self) -> None:
        """The pass in service."""
        running = self.state.running
        if running is None:
            return
        several = isinstance(running.job, Batch)
        results = [(1,) * len(part.job.sampled_rows) for part in running.parts]
        self.feed(Computed(running.job, tuple(results) if several else results[0], 0.2))

    def fires(self) -> None:
        """The deadline, if there is one."""
        if self.armed:
            self.armed = False
            self.feed(TimerFired(BATCH_DEADLINE))

    @property
    def running(self) -> list[int]:
        running = self.state.running
        return [part.segment.session for part in running.parts] if running else []

    @property
    def waiting(self) -> list[int]:
        return [waiting.session for waiting in self.state.queue]


def test_a_segment_that_does_not_fit_takes_the_next_pass_and_is_not_late() -> None:
    stage = Stage([[0, 1], [2]], most=8)
    stage.comes(0)
    assert stage.running == []
    stage.comes(1)
    assert (stage.running, stage.waiting) == ([0], [1])
    stage.over()
    assert (stage.running, stage.waiting) == ([1], [])
    stage.over()
    stage.now = 1.5
    stage.fires()
    assert stage.state.schedule.suspensions.keys() == {2}


def test_a_batch_of_which_only_served_ones_are_left_has_had_its_turn() -> None:
    stage = Stage([[0, 1, 2], [3]], most=8)
    for session in range(3):
        stage.comes(session)
    stage.over()
    assert (stage.running, stage.waiting) == ([1], [2])
    schedule = stage.state.schedule
    assert sorted(schedule.served) == [0, 1]
    assert list(schedule.current) == [0, 1, 2]
    stage.over()
    assert stage.running == [2]
    stage.over()
    stage.comes(3)
    assert stage.running == [3]


events = st.one_of(
    st.tuples(st.just("comes"), st.integers(0, USERS - 1)),
    st.tuples(st.just("comes"), st.just(100)),
    st.tuples(st.sampled_from(["over", "fires"]), st.just(0)),
)


@given(
    st.sampled_from([8, 12, 99]),
    st.sampled_from([[[0, 1], [2, 3, 4]], [[0, 1, 2, 3, 4]], [[0], [1], [2, 3], [4]]]),
    st.lists(events, max_size=60),
)
def test_no_user_waits_for_ever(
    most: int, batches: list[list[int]], happens: list[tuple[str, int]]
) -> None:
    """Whatever comes when: what waits is served, the device is busy, or a deadline will come; and
    nobody who waits or was served in this turn is suspended."""
    stage = Stage(batches, most, also=1)
    for what, who in happens:
        stage.now += 0.1
        here = {*stage.waiting, *stage.state.schedule.served}
        before = set(stage.state.schedule.suspensions)
        if what == "comes":
            stage.comes(who)
        elif what == "over":
            stage.over()
        else:
            stage.fires()
            assert not (stage.state.schedule.suspensions.keys() - before) & here
        assert stage.running or not stage.waiting or stage.armed
        assert stage.state.schedule.served <= set(stage.state.schedule.current)
