"""Several draft nodes on one pipeline: everybody gets the sequential decoder's text, and what one
of them does, or suffers, is no other's business."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.jobs import Batch, Forward, Job
from asyncspec.core.machine import Request
from asyncspec_protocol.ids import Rank, SessionId, draft_rank, first_session
from asyncspec_protocol.messages import Expand, Message
from byzantine_draft import LinkClosingWorld, arbitrary_messages, inert, opening, source_messages
from cluster import Cluster, ask
from effort import examples
from laws import check_after, clusters, requests, watch_invariants

BOUND = 200_000.0
"""More virtual time than any of these small requests can need: a bound on liveness."""


class Wish(Struct, frozen=True):
    """A user's request, of which draft node, and when."""

    request: Request
    of: Rank
    when: int


class Users:
    """They ask their draft nodes; what a draft node was asked ends with it."""

    def __init__(self, cluster: Cluster, wishes: list[Wish]) -> None:
        self.cluster = cluster
        self.wishes = wishes
        # By number, with the draft node they are of.
        self.asked: dict[int, Rank] = {}
        self.doomed: set[int] = set()
        for wish in wishes:
            cluster.world.at(wish.when, self._ask, wish)

    def _ask(self, wish: Wish) -> None:
        number = wish.request.request
        if wish.of in self.cluster.drafts:
            self.asked[number] = wish.of
            self.cluster.submit(wish.request, wish.of)
        else:
            self.doomed.add(number)

    def leave(self, rank: Rank) -> None:
        """A draft node ends."""
        finished = self.cluster.world.finished
        self.doomed |= {n for n, of in self.asked.items() if of == rank and n not in finished}
        self.cluster.leave(rank)

    def come(self, rank: Rank) -> None:
        """A draft node begins, or what links it has lost are made again."""
        self.cluster.drafts.add(rank)
        self.cluster.connect_all()

    def check(self) -> None:
        """Nobody was told anything wrong, and all whose draft node has not ended were served."""
        world = self.cluster.world
        for wish in self.wishes:
            reported = tuple(world.tokens.get(wish.request.request, ()))
            assert reported == self.cluster.expected(wish.request)[: len(reported)]
        served = [w.request for w in self.wishes if w.request.request not in self.doomed]
        check_after(self.cluster, served)

    def check_undisturbed(self, drafts: set[Rank]) -> None:
        """The users of these draft nodes were served in one session each."""
        for wish in self.wishes:
            if wish.of in drafts:
                finish = self.cluster.world.finished[wish.request.request]
                assert finish.reason in {"stop", "length"}
                assert finish.stats["sessions"] == 1


@st.composite
def crowds(draw: st.DrawFn, least: int = 1, **fixed: Any) -> Users:
    """One to six draft nodes on one to three stages, each with some users."""
    drafts = draw(st.integers(least, 6))
    wishes: list[Wish] = []
    for number in range(drafts):
        for request in draw(requests(2)):
            own = replace(request, request=len(wishes))
            wishes.append(Wish(own, draft_rank(number), draw(st.integers(0, 40))))
    # A share for each, and for one more, in which its users' requests have room.
    slots = (drafts + 1) * draw(st.sampled_from((0, 128, 250)))
    stages = draw(st.integers(1, 3))
    cluster = draw(clusters(drafts=drafts, stages=stages, slots=slots, **fixed))
    watch_invariants(cluster)
    return Users(cluster, wishes)


class Passes:
    """A pass takes a turn whatever is in it, a draft and a hop a fraction of one."""

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        return 0.05

    def device(self, rank: Rank, job: Job) -> float:
        if isinstance(job, Expand):
            return 0.3
        return 1.0 if isinstance(job, Forward | Batch) else 0.0


def test_sessions_of_several_draft_nodes_share_passes_as_those_of_one_do() -> None:
    """No draft node knows of another, and yet a stage is not busier than it has to be."""
    passes: list[int] = []
    for drafts in (1, 6):
        cluster = Cluster(Passes(), drafts=drafts, max_sessions=6, batch_rows=256)
        asked = [ask(number, max_new_tokens=40) for number in range(6)]
        for number, request in enumerate(asked):
            cluster.submit(request, draft_rank(number % drafts))
        cluster.world.run(until=BOUND)
        check_after(cluster, asked)
        passes.append(cluster.world.actors[Rank(1)].passes)
    one, several = passes
    assert several <= 1.1 * one


moments = st.integers(0, 60)
# When, to whom, what (0: it ends; else the link to that stage is cut), and for how long.
strikes = st.lists(
    st.tuples(moments, st.integers(0, 5), st.integers(0, 3), st.integers(1, 30)), max_size=6
)


@settings(max_examples=examples(150, quick=40))
@given(crowds(least=2), strikes, st.data())
def test_losses_of_other_draft_nodes_leave_a_session_untouched(
    users: Users, drawn: list[tuple[int, int, int, int]], data: st.DataObject
) -> None:
    """Draft nodes end, come later, come back, or lose a link; some of them only watch."""
    cluster, world = users.cluster, users.cluster.world
    ranks = sorted(cluster.drafts)
    steady = data.draw(st.integers(1, len(ranks) - 1))
    shaky = ranks[steady:]
    for rank in shaky:
        if data.draw(st.booleans()):
            users.leave(rank)
            world.at(data.draw(moments), users.come, rank)
    for when, which, what, pause in drawn:
        rank, stage = shaky[which % len(shaky)], Rank(what % (cluster.stages + 1))
        if stage:
            world.at(when, world.cut, rank, stage)
        else:
            world.at(when, users.leave, rank)
        if stage or which % 2:
            world.at(when + pause, users.come, rank)
    world.run(until=BOUND)
    users.check()
    users.check_undisturbed(set(ranks[:steady]))


@settings(max_examples=examples(300, quick=60))
@given(crowds(least=2, world=LinkClosingWorld), st.data())
def test_a_byzantine_draft_node_is_refused_and_the_others_are_served(
    users: Users, data: st.DataObject
) -> None:
    """It speaks of others' sessions, sends more than it may, announces what never comes, tells
    stages different things; and dials again."""
    cluster = users.cluster
    world = cluster.world
    assert isinstance(world, LinkClosingWorld)
    honest = sorted(cluster.drafts)
    byzantine = draft_rank(len(honest))
    world.byzantine = frozenset((byzantine,))
    world.actors[byzantine] = inert()
    cluster.drafts.add(byzantine)
    cluster.connect_all()
    foreign = [first_session(rank) for rank in honest]
    for life in range(data.draw(st.integers(1, 5))):
        session = SessionId(first_session(byzantine) + life)
        world.at(15 * life, cluster.connect_all)
        like = session - 1 if data.draw(st.booleans()) and life else -1
        world.at(15 * life, world.inject, byzantine, Rank(1), opening(session, like))
        for when in sorted(data.draw(st.lists(st.integers(0, 14), max_size=8))):
            stage, message = data.draw(arbitrary_messages(session, foreign, cluster.stages))
            world.at(15 * life + when, world.inject, byzantine, stage, message)
    world.at(1000, cluster.drafts.discard, byzantine)
    for rank in range(1, cluster.stages + 1):
        world.at(1000, world.cut, byzantine, Rank(rank))
    if cluster.config.source is not None:
        world.at(1000, world.cut, byzantine, cluster.config.source)
    world.run(until=BOUND)
    users.check()
    users.check_undisturbed(set(honest))


@settings(max_examples=examples(100, quick=25))
@given(crowds(least=2, world=LinkClosingWorld, apart=True, features=()), st.data())
def test_a_byzantine_peer_of_the_token_source_is_refused_and_the_others_are_served(
    users: Users, data: st.DataObject
) -> None:
    """It asks, withdraws and ends what is others', and what never was."""
    cluster = users.cluster
    world, source = cluster.world, cluster.config.source
    assert isinstance(world, LinkClosingWorld)
    assert source is not None
    honest = sorted(cluster.drafts)
    byzantine = draft_rank(len(honest))
    world.byzantine = frozenset((byzantine,))
    world.actors[byzantine] = inert()
    own = [SessionId(first_session(byzantine) + n) for n in range(2)]
    others = [SessionId(first_session(rank) + n) for rank in honest for n in range(2)]
    for when in sorted(data.draw(st.lists(st.integers(0, 60), max_size=12))):
        world.at(when, world.connect, byzantine, source)
        world.at(when, world.inject, byzantine, source, data.draw(source_messages(own, others)))
    world.at(1000, world.connect, byzantine, source)
    world.at(1000, world.cut, byzantine, source)
    world.run(until=BOUND)
    users.check()
    users.check_undisturbed(set(honest))
