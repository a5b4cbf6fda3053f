"""Drafting ahead while a chain is verified: what is there in time counts, and nothing waits for
what never comes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.jobs import Batch, Forward, Job, draft_jobs
from asyncspec.core.machine import Effect, Input, Received, Send
from asyncspec.plugins.toy.model import ToyModel
from asyncspec.sim.world import Actor, World
from asyncspec_nodes.roles.source import SourceConfig, SourceMachine
from asyncspec_protocol.ids import DRAFT, Rank, SessionId, is_draft
from asyncspec_protocol.messages import Expand, Expanded, Message, Segment, Withdraw
from cluster import Cluster, ask
from laws import Shaken, check_empty, watch_invariants

AHEAD = "dip-sd:length=2,plan=false,ahead=true"


class Slow:
    """A pass takes long enough to draft four tokens meanwhile."""

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        return 0.0

    def device(self, rank: Rank, job: Job) -> float:
        if isinstance(job, Forward | Batch):
            return 4.5
        return float(max(tree.depth for tree in draft_jobs(job))) if draft_jobs(job) else 0.0


def segments(cluster: Cluster) -> list[int]:
    """Rows of each segment that the draft node sends from now on, prompts included."""
    sent: list[int] = []

    def watch(rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        reported = [e.message for e in effects if is_draft(rank) and isinstance(e, Send)]
        sent.extend(len(message.ids) for message in reported if isinstance(message, Segment))

    cluster.world.watch = watch
    return sent


def test_a_hit_brings_what_was_drafted_meanwhile_on_top_of_the_length() -> None:
    """All guesses are right: a chain of two and its root, and from then on two tokens below the
    next root, which was drafted too, and two more after the verdict."""
    cluster = Cluster(Slow(), stages=1, model=ToyModel(seed=1))
    sent = segments(cluster)
    cluster.world.actors[Rank(0)].device = perfect(cluster)
    request = ask(policy=AHEAD, max_new_tokens=40)
    cluster.submit(request)
    cluster.world.run(until=1e5)
    assert tuple(cluster.world.tokens[0]) == cluster.expected(request)
    decoding = sent[-8:-1]
    assert set(decoding) == {1 + 2 + 2}
    # The last token of an answer is never drafted.
    assert cluster.world.finished[0].stats["misses"] <= 1


def perfect(cluster: Cluster) -> Any:
    """A source that knows the target's text."""
    model, whole = cluster.model, list[int]()

    def run(job: Any) -> Expanded | None:
        if not hasattr(job, "depth"):
            return None
        whole.extend(job.committed)
        text, tokens = [*whole, *job.tokens], []
        for _ in range(job.depth):
            token = model.mode(model.read(text).hidden)
            tokens.append(token)
            text.append(token)
        known = len(job.tokens)
        line = tuple(range(-1, known + len(tokens) - 1))
        scores = (0.0,) * len(line)
        return Expanded(job.session, job.version, len(whole), line, (*job.tokens, *tokens), scores)

    return run


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.lists(st.integers(0, 3)), st.data())
def test_a_source_without_proposals_delays_no_session(
    delays: list[int], says: list[int], data: st.DataObject
) -> None:
    """It grows a token or two, or nothing, as it likes."""
    stages = data.draw(st.integers(1, 3))
    cluster = Cluster(Shaken([*delays, 1]), stages=stages, model=ToyModel(vocab=8))
    watch_invariants(cluster)
    actor, asked = cluster.world.actors[Rank(0)], [0]
    whole = actor.device

    def some(job: Any) -> object | None:
        answer = whole(job)
        if not isinstance(answer, Expanded):
            return answer
        asked[0] += 1
        count = says[asked[0] % len(says)] if says else 0
        part = slice(0, len(job.tokens) + count)
        return replace(
            answer,
            parents=answer.parents[part],
            tokens=answer.tokens[part],
            scores=answer.scores[part],
        )

    actor.device = some
    request = ask(policy="dip-sd:length=3,ahead=true", max_new_tokens=30)
    cluster.submit(request)
    cluster.world.run(until=1e5)
    assert tuple(cluster.world.tokens[0]) == cluster.expected(request)
    check_empty(cluster)


@pytest.mark.parametrize(("whole_levels", "end"), [(False, 2.5), (True, 3.0)])
def test_a_draft_that_is_given_up_ends_with_its_level_on_a_real_device(
    whole_levels: bool, end: float
) -> None:
    machine = SourceMachine(SourceConfig(Rank(2), 8))
    actor = Actor(machine, machine.initial(), lambda job: None)
    world = World({Rank(2): actor}, Slow(), whole_levels=whole_levels)
    world.feed(Rank(2), Received(DRAFT, Expand(0, 0, 0, (1,), 5, 1, 5)))
    world.at(2.5, world.feed, Rank(2), Received(DRAFT, Withdraw(SessionId(0))))
    world.run()
    assert actor.busy_seconds == end
