"""How many rows of a pass sessions should share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.kv_slots import CacheSlot, SlotTable
from asyncspec.core.liveness import Liveness
from asyncspec_nodes.roles.verify.batch_schedule import BatchSchedule
from asyncspec_nodes.roles.verify.batching import FairShare, fair_share
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.session import QueuedSegment, StageSession, VerifyState
from asyncspec_protocol.ids import NO_PARENT, NodeId, Rank, SegmentId, SessionId, Version
from asyncspec_protocol.messages import Rates
from nodes.machine_driver import opening

PROMPT = 10

counts = st.integers(0, 20)
sizes = st.lists(st.tuples(counts, st.lists(st.integers(1, 9), max_size=2)), max_size=6)


def stage(stages: int, sessions: list[tuple[int, list[int]]], prompts: int = 0) -> VerifyState:
    """A first stage: of each session nodes under way, and rows of the segments that wait."""
    held, queue = {}, []
    for number, (under_way, waiting) in enumerate(sessions):
        name = SessionId(number)
        seats = {NodeId(PROMPT + i): CacheSlot(NO_PARENT) for i in range(under_way)}
        table = SlotTable(PROMPT, speculative=seats)
        held[name] = StageSession(opening(PROMPT, name), Liveness(PROMPT), table)
        for rows in waiting:
            ids = tuple(NodeId(100 + i) for i in range(rows))
            queue.append(QueuedSegment(name, SegmentId(0), Version(0), ids, ids))
    for number in range(prompts):
        name = SessionId(len(sessions) + number)
        held[name] = StageSession(opening(PROMPT, name), Liveness(PROMPT))
        queue.append(QueuedSegment(name, SegmentId(0), Version(0), (NodeId(0),), (NO_PARENT,)))
    config = VerifyConfig(rank=Rank(1), stages=stages)
    return VerifyState(config, sessions=held, queue=tuple(queue))


@given(st.integers(1, 9), sizes, st.integers(0, 3))
def test_an_even_part_of_all_rows_or_half_of_those_that_could_go(
    stages: int, sessions: list[tuple[int, list[int]]], prompts: int
) -> None:
    """Prompts' pieces do not count, and a session that is away with nothing in its tree has a row,
    the one whose token is known."""
    share = fair_share(stage(stages, sessions, prompts))
    rows = sum((away or not waiting) + sum(waiting) for away, waiting in sessions)
    heads = sum(waiting[0] for _, waiting in sessions if waiting)
    assert share is not None
    found = share.rows
    assert stages * found >= rows
    assert 2 * found >= heads
    assert found == 0 or stages * (found - 1) < rows or 2 * (found - 1) < heads


def test_the_association_may_be_given() -> None:
    first = stage(2, [(4, [3]), (0, [2])])
    assert fair_share(first) == FairShare(5, {}.keys())
    later = replace(first, config=replace(first.config, rank=Rank(2)))
    assert fair_share(later) is None


def test_others_share_as_if_there_were_no_plan() -> None:
    name = SessionId(0)
    planned = replace(
        stage(2, [(4, [3]), (0, [2]), (6, [])]), schedule=BatchSchedule(members={name: Rates(name)})
    )
    assert fair_share(planned) == FairShare(4, {name: None}.keys())
