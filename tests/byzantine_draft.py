"""A draft node that sends arbitrary messages, and a world that answers a protocol error as the
runtime does: it closes the link."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.jobs import Job
from asyncspec.core.machine import Effect, Input, Received, Send
from asyncspec.sim.world import Actor, World
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import (
    Close,
    Credit,
    Expand,
    Fault,
    Floor,
    Message,
    Open,
    PassTimes,
    PruneIndices,
    Rates,
    Segment,
    Withdraw,
)


class Inert:
    """A machine without effects."""

    def step(self, state: Any, event: Input, now: float) -> tuple[Any, tuple[Effect, ...]]:
        return state, ()


def inert() -> Actor:
    """A node that sends nothing by itself."""
    return Actor(Inert(), None, no_device)


def no_device(job: Job) -> None:
    raise AssertionError("nothing is computed here")


class LinkClosingWorld(World):
    """Cuts the link of a byzantine node whose message is refused; other nodes send none."""

    byzantine: frozenset[Rank] = frozenset()
    # The errors, and the peers they are reported to.
    refused: list[tuple[Rank, str]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.refused = []

    def feed(self, rank: Rank, event: Input) -> None:
        try:
            super().feed(rank, event)
        except RemoteProtocolError as error:
            peer = error.peer
            if peer is None and isinstance(event, Received):
                peer = event.peer
            if peer not in self.byzantine:
                raise
            self.refused.append((Rank(peer), error.text))
            self.cut(rank, Rank(peer))
        else:
            if isinstance(event, Received) and isinstance(event.message, Fault):
                self.refused.append((rank, event.message.text))
                self.cut(event.peer, rank)

    def inject(self, sender: Rank, stage: Rank, message: Message) -> None:
        """``sender`` sends a message to a stage, if their link is up."""
        self._send(sender, self.actors[sender], Send(stage, message))


small = st.integers(0, 3)
shares = st.floats(0, 1)
nodes = st.integers(0, 9)
several = st.lists(nodes, max_size=4).map(tuple)
mores = st.sampled_from([0, 0, 0, 1, 2, 9])


@st.composite
def segments(draw: st.DrawFn, session: int) -> Segment:
    """Any nodes."""
    ids = draw(st.lists(nodes, min_size=1, max_size=4, unique=True))
    parents = tuple(draw(st.integers(-1, n - 1)) for n in ids)
    tokens = tuple(n % 8 for n in ids)
    return Segment(
        session, 0, draw(small), tuple(ids), parents, tokens, batch_remaining=draw(mores)
    )


@st.composite
def chains(draw: st.DrawFn, session: int) -> Segment:
    """Two nodes that follow what an honest draft node would have sent before."""
    start = draw(st.sampled_from((0, 0, 2, 4)))
    ids, parents = (start, start + 1), (start - 1, start)
    return Segment(session, start, 0, ids, parents, (1, 2), batch_remaining=draw(mores))  # type: ignore[arg-type]


def opening(session: int, like: int = -1) -> Open:
    """A session that begins as it should, or like another one that may not be its draft node's."""
    shared = 2 if like >= 0 else 0
    return Open(session, 1 + shared, 20, 0, 0.0, 0, 1.0, parent_session=like, common_prefix=shared)  # type: ignore[arg-type]


def narrow(opened: Open) -> Open:
    """The same for a few tokens and a small tree, so that there are soon too many nodes."""
    return replace(opened, capacity=opened.prompt_length + 2, max_tree_nodes=2)


@functools.cache
def messages_about(
    session: int, parent: int
) -> tuple[st.SearchStrategy[Message], st.SearchStrategy[Message]]:
    """To the first stage, to any stage. ``parent``: of a session that is opened."""
    about: Any = st.just(session)
    prunes = st.builds(PruneIndices, about, small, nodes, several, several)
    opened = opening(session, parent)
    to_first = st.one_of(
        chains(session),
        chains(session),
        segments(session),
        st.sampled_from((opened, narrow(opened))),
        st.builds(Rates, about, small, *[shares] * 7),
        st.builds(PassTimes, small, st.just((1.0, 8.0)), st.tuples(shares, shares), shares, shares),
    )
    to_all = st.one_of(
        prunes,
        prunes,
        st.builds(Close, about, st.booleans()),
        st.builds(Floor, about),
        st.builds(Credit, small),
        segments(session),
    )
    return to_first, to_all


@st.composite
def arbitrary_messages(
    draw: st.DrawFn, session: int, foreign: Sequence[int], stages: int
) -> tuple[Rank, Message]:
    """A message about a session, most often its own, and the stage it goes to."""
    about = draw(st.sampled_from((session,) * 12 + tuple(foreign)))
    stage = Rank(draw(st.integers(1, stages)))
    parent = draw(st.sampled_from((-1, session - 1, *foreign)))
    to_first, to_all = messages_about(about, parent)
    if draw(st.booleans()):
        return Rank(1), draw(to_first)
    return stage, draw(to_all)


@functools.cache
def source_messages_about(session: SessionId) -> st.SearchStrategy[Message]:
    """To a token source."""
    about: Any = st.just(session)
    committed = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    expand = st.builds(Expand, about, st.just(0), small, committed, small, small, small)
    ends = st.builds(Withdraw, about), st.builds(Close, about), st.builds(Floor, about)
    return st.one_of(expand, expand, *ends)


def source_messages(
    own: Sequence[SessionId], others: Sequence[SessionId]
) -> st.SearchStrategy[Message]:
    """A message to a token source, most often about one of the sender's own sessions."""
    sessions = st.sampled_from((*own, *own, *own, *others))
    return sessions.flatmap(source_messages_about)
