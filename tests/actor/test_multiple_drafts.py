"""Several draft nodes on real sockets, and what a bad one can do to the others: nothing."""

from __future__ import annotations

import asyncio
from types import TracebackType

from msgspec.structs import replace

from actor.local_cluster import LocalCluster, hello
from asyncspec.core.machine import Request
from asyncspec_protocol.framing import FrameReader, write_frame
from asyncspec_protocol.ids import Rank, draft_rank, first_session
from asyncspec_protocol.messages import (
    Credit,
    Fault,
    Heartbeat,
    Message,
    Segment,
    Welcome,
)
from cluster import ask
from nodes.machine_driver import opening, segment

STRANGER = draft_rank(9)
THEIRS = first_session(STRANGER)


class Stranger:
    """Somebody at a stage's port who writes what he likes."""

    def __init__(self, cluster: LocalCluster, stage: int, rank: int = STRANGER) -> None:
        self._port = cluster.ports[Rank(stage)]
        self._hello = hello(rank, cluster.stages)
        self._frames = FrameReader(trusted=True)

    async def __aenter__(self) -> Stranger:
        self._reader, self._writer = await asyncio.open_connection(*self._port)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.close()

    async def say(self, *messages: Message) -> None:
        """Whole frames."""
        await self.trickle(b"".join(map(frame, messages)))

    async def trickle(self, some: bytes) -> None:
        """Part of a frame."""
        self._writer.write(some)
        await self._writer.drain()

    async def greet(self) -> Message:
        """The answer to a hello."""
        await self.say(self._hello)
        return await self.receive()

    async def receive(self) -> Message:
        """What comes next, heartbeats apart."""
        while True:
            while (found := self._frames.next_frame()) is not None:
                if not isinstance(found.message, Heartbeat):
                    return found.message
            buffer = self._frames.get_buffer(-1)
            some = await self._reader.read(len(buffer))
            assert some, "the link was closed without a word"
            buffer[: len(some)] = some
            self._frames.buffer_updated(len(some))

    async def closed(self) -> None:
        """The other side has closed the link."""
        while await self._reader.read(4096):
            pass


def frame(message: Message) -> bytes:
    return b"".join(map(bytes, write_frame(message, None, None)))


def theirs(number: int, more: int = 0) -> Segment:
    nodes = {number: number - 1}
    return replace(segment(number, nodes, session=THEIRS), batch_remaining=more)


async def served(cluster: LocalCluster, first: int) -> None:
    """Every draft node's users get the reference decoder's text, in a session each."""
    asked = {rank: ask(first + i, max_new_tokens=12) for i, rank in enumerate(cluster.drafts)}
    ends = await asyncio.gather(*(cluster.ask(one, rank) for rank, one in asked.items()))
    for (rank, request), end in zip(asked.items(), ends, strict=True):
        assert (end.reason, end.stats["sessions"]) == ("length", 1)
        assert tuple(cluster.shells[rank].tokens[request.request]) == expected(cluster, request)


def expected(cluster: LocalCluster, request: Request) -> tuple[int, ...]:
    tokens = list(request.prompt)
    for _ in range(request.max_new_tokens):
        tokens.append(cluster.model.next_token(tuple(tokens), request.sampling))
    return tuple(tokens[len(request.prompt) :])


def run(main: object) -> None:
    asyncio.run(asyncio.wait_for(main, 240))  # type: ignore[arg-type]


def test_four_draft_nodes_share_two_stages() -> None:
    async def main() -> None:
        async with LocalCluster(2, drafts=4) as cluster:
            await asyncio.gather(*(served(cluster, 10 * i) for i in range(3)))
            for stage in (1, 2):
                assert not cluster.nodes[stage]._outgoing.session_bytes

    run(main())


def test_a_draft_node_that_ends_leaves_the_others_alone_and_may_come_back() -> None:
    async def main() -> None:
        async with LocalCluster(2, drafts=2) as cluster:
            gone = cluster.drafts.pop()
            lost = asyncio.ensure_future(
                cluster.ask(ask(0, max_new_tokens=3000, policy="autoregressive"), gone)
            )
            await cluster.shells[gone].has(0, 20)
            others = asyncio.ensure_future(served(cluster, 1))
            await cluster.stop(gone)
            await others
            lost.cancel()
            cluster.start(gone)
            cluster.drafts.append(gone)
            await served(cluster, 10)
            for stage in (1, 2):
                assert not cluster.nodes[stage].state.sessions
                assert not cluster.nodes[stage]._outgoing.session_bytes

    run(main())


def test_a_peer_that_trickles_delays_no_other() -> None:
    """It announces two segments, sends one, and of the other a byte now and then."""

    async def main() -> None:
        async with LocalCluster(2, drafts=2) as cluster, Stranger(cluster, 1) as stranger:
            assert isinstance(await stranger.greet(), Welcome)
            await served(cluster, 0)
            await stranger.say(opening(1, THEIRS), theirs(0, more=1))
            rest = frame(theirs(1))
            for i in range(4):
                await stranger.trickle(rest[i : i + 1])
                await served(cluster, 10 + 10 * i)
            state = cluster.nodes[1].state
            assert [waiting.session for waiting in state.queue] == [THEIRS]
            assert state.inbound[STRANGER].expected == 1
            # Whole, it is as good as any other.
            await stranger.trickle(rest[4:])
            while not isinstance(await stranger.receive(), Credit):
                pass
            await served(cluster, 100)
            assert not cluster.nodes[1].state.queue

    run(main())


def test_a_number_is_given_once() -> None:
    async def main() -> None:
        async with LocalCluster(1, drafts=2) as cluster:
            await served(cluster, 0)
            async with Stranger(cluster, 1, draft_rank(1)) as second:
                refusal = await second.greet()
            assert isinstance(refusal, Fault)
            assert refusal.text == (
                "draft node 1 is connected already: give each draft node a number of its own "
                "(--rank)"
            )
            await served(cluster, 10)

    run(main())
