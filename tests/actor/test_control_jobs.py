"""Jobs that come as quickly as a peer can write: its link is read no further than the device keeps
up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from actor.local_cluster import QUICK, LocalCluster, hello
from asyncspec.actor.device import BASE_JOBS, JOB_SLOTS, SESSION_JOBS, ControlJobs
from asyncspec.actor.link import Link
from asyncspec.core.jobs import Admit, Compact, Feed, Forward, Job, Release, Trim
from asyncspec.core.sampling import Sampling
from asyncspec_protocol.framing import Frame
from asyncspec_protocol.ids import Rank, SegmentId, SessionId, draft_rank, first_session, owner
from asyncspec_protocol.messages import (
    Close,
    Closed,
    Message,
    Open,
    PruneIndices,
    Segment,
    Verdict,
    Welcome,
)

HOSTILE, HONEST = draft_rank(1), draft_rank(0)
FEW = BASE_JOBS + 2 * SESSION_JOBS


class Gate:
    """A device that waits before its first job, and what it has run since."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = threading.Event()
        self.ran: list[Job] = []

    def device(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def gated(job: Job) -> Any:
            self.begun.set()
            assert self.open.wait(240)
            self.ran.append(job)
            return run(job)

        return gated


class Draft:
    """A draft node that says what it is told to say."""

    def __init__(self, rank: Rank) -> None:
        self.link = Link(QUICK, self._received, lambda link, reason: None)
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.first = first_session(rank)
        self._rank = rank

    async def connect(self, address: tuple[str, int]) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self.link, *address)
        self.link.send(hello(self._rank, 1))
        await self.hears(Welcome)

    async def hears(self, kind: type[Message]) -> Message:
        """The next message of a kind."""
        while not isinstance(message := await self.messages.get(), kind):
            pass
        return message

    def open(self, number: int, *, nodes: int = 0) -> None:
        name = SessionId(self.first + number)
        self.link.send(Open(name, 1, 64, 0, 0.0, 0, 1.0, max_tree_nodes=nodes))

    def root(self, number: int) -> None:
        """The only token of a prompt."""
        self.link.send(Segment(SessionId(self.first + number), SegmentId(0), 0, (0,), (-1,), (0,)))

    def _received(self, link: Link, frame: Frame) -> None:
        if isinstance(frame.message, Welcome):
            link.accepted(frame.message)
        self.messages.put_nowait(frame.message)


@asynccontextmanager
async def shared_stage(gate: Gate) -> AsyncIterator[tuple[LocalCluster, Draft, Draft]]:
    """A stage with both draft nodes."""
    cluster = LocalCluster(1, drafts=0, devices={1: gate.device})
    try:
        async with cluster:
            hostile, honest = drafts = Draft(HOSTILE), Draft(HONEST)
            for draft in drafts:
                await draft.connect(cluster.ports[Rank(1)])
            yield cluster, hostile, honest
            gate.open.set()
            for draft in drafts:
                draft.link.close("over")
    finally:
        gate.open.set()


async def until(true: Callable[[], bool]) -> None:
    """Let the event loop work."""
    while True:
        await asyncio.sleep(0)
        if true():
            return


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 240))


def test_sessions_that_open_and_close_without_end_leave_others_their_turn() -> None:
    async def main() -> None:
        gate, pairs = Gate(), 1000
        async with shared_stage(gate) as (cluster, hostile, honest):
            stage = cluster.nodes[1]
            for number in range(pairs):
                hostile.open(number)
                hostile.link.send(Close(SessionId(hostile.first + number)))
            last = hostile.first + pairs - 1
            await until(
                lambda: (
                    stage.links[HOSTILE].holds_reading or stage.state.marks(HOSTILE).opened == last
                )
            )
            assert gate.begun.wait(240)
            assert stage.jobs <= FEW
            honest.open(0)
            honest.root(0)
            await until(lambda: honest.first in stage.state.sessions)
            await until(lambda: stage.state.running is not None)
            assert stage.jobs <= FEW + 2
            gate.open.set()
            await honest.hears(Verdict)
            passes = [i for i, job in enumerate(gate.ran) if isinstance(job, Forward)]
            assert passes[0] <= FEW + 2
            # It is not at fault, and all of it has its turn.
            for _ in range(pairs):
                assert isinstance(await hostile.hears(Closed), Closed)
            await until(lambda: len(gate.ran) == 2 * pairs + 2)  # the last may still run

    run(main())


def test_prunes_of_large_trees_count_for_what_they_move() -> None:
    nodes = 1000

    async def main() -> None:
        gate = Gate()
        gate.open.set()
        async with shared_stage(gate) as (cluster, hostile, _):
            stage, name = cluster.nodes[1], hostile.first
            hostile.open(0, nodes=nodes)
            hostile.root(0)
            await hostile.hears(Verdict)
            ids = tuple(range(1, nodes + 1))
            hostile.link.send(Segment(name, SegmentId(1), 0, ids, (0,) * nodes, (1,) * nodes))
            await hostile.hears(Verdict)
            gate.open.clear()
            prunes = 200
            for version in range(1, prunes):
                hostile.link.send(PruneIndices(name, version, version + 1, (), ()))
            await until(
                lambda: (
                    stage.links[HOSTILE].holds_reading
                    or stage.state.sessions[name].liveness.version == prunes - 1
                )
            )
            assert stage.jobs <= 1 + FEW * JOB_SLOTS // (nodes - prunes)
            gate.open.set()
            hostile.link.send(Close(name))
            await hostile.hears(Closed)

    run(main())


SESSIONS = st.integers(0, 3)
RANKS = st.sampled_from([HOSTILE, HONEST])


@st.composite
def control_jobs(draw: st.DrawFn) -> Job:
    session = SessionId(first_session(draw(RANKS)) + draw(SESSIONS))
    keep = tuple(range(draw(st.sampled_from([0, JOB_SLOTS - 1, JOB_SLOTS, 20 * JOB_SLOTS]))))
    jobs: list[Job] = [
        Admit(session, 9, Sampling()),
        Compact(session, 0, keep),
        Trim(session, 3),
        Release(session),
        Feed(session, 0, ()),
        Forward(session, SegmentId(0), 0, ()),
    ]
    return draw(st.sampled_from(jobs))


def weight(job: Job) -> int:
    if isinstance(job, Forward):
        return 0
    return 1 + len(job.keep) // JOB_SLOTS if isinstance(job, Compact) else 1


@given(st.lists(st.tuples(control_jobs(), st.integers(1, 40)), max_size=30), st.data())
def test_a_draft_node_is_held_for_its_own_jobs_alone(
    bursts: list[tuple[Job, int]], data: Any
) -> None:
    held: dict[Rank, bool] = {}
    jobs = ControlJobs(held.__setitem__)
    waiting: list[Job] = []
    opened: set[SessionId] = set()

    def check() -> None:
        for rank in (HOSTILE, HONEST):
            own = sum(map(weight, (job for job in waiting if owner(job.session) == rank)))  # type: ignore[union-attr]
            most = BASE_JOBS + SESSION_JOBS * len([one for one in opened if owner(one) == rank])
            if own > most:
                assert held[rank]
            elif own <= most // 2:
                assert not held.get(rank)

    for job, times in bursts:
        for _ in range(times):
            waiting.append(job)
            jobs.submitted(job)
            if isinstance(job, Admit | Feed):
                opened.add(job.session)
            elif isinstance(job, Release):
                opened.discard(job.session)
        check()
        for _ in range(data.draw(st.integers(0, len(waiting)))):
            jobs.finished(waiting.pop(0))
        check()
    while waiting:
        jobs.finished(waiting.pop(0))
    assert not any(held.values())
