"""What users are told of hits, misses, rounds and rows, against what went by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.core import tree as trees
from asyncspec.core.machine import Effect, Emit, Input, Received, Request, Send
from asyncspec_protocol.ids import DRAFT, Rank, SessionId
from asyncspec_protocol.messages import Closed, Segment, Verdict
from cluster import Cluster
from effort import examples
from laws import check_after, clusters, lose_links, requests

BOUND = 100_000.0


class Onlooker:
    """Counts by the words of docs/reference/metrics.md, from the draft node's trees and
    messages."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.sessions: Mapping[SessionId, Any] = {}
        # By request: which tokens were nodes when the target chose them, the first of each session
        # left out; and verdicts that came after that one.
        self.chosen: dict[int, list[bool]] = {}
        self.passes: Counter[int] = Counter()
        # Rounds of which something was sent, by request. One that was begun before the first token
        # is none where that was not guessed, or never came.
        self.begun: dict[int, set[tuple[SessionId, int]]] = {}
        self.guesses: set[SessionId] = set()
        # Whose a session is, and what nodes have said that it has cost.
        self.owners: dict[SessionId, int] = {}
        self.closed: dict[int, list[Closed]] = {}
        cluster.world.watch = self.watch

    def watch(self, rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        if rank != DRAFT:
            return
        before, self.sessions = self.sessions, self.cluster.state(rank).sessions
        self.owners |= {name: one.request.request for name, one in self.sessions.items()}
        message = event.message if isinstance(event, Received) else None
        if isinstance(message, Verdict):
            session = before.get(message.session)
            if session is not None and session.decoding:
                self.passes[session.request.request] += 1
        elif isinstance(message, Closed) and message.session in self.owners:
            name = self.owners[message.session]
            if name not in self.cluster.world.finished:
                self.closed.setdefault(name, []).append(message)
        for effect in effects:
            if isinstance(effect, Emit):
                (session,) = [s for s in before.values() if s.request.request == effect.request]
                self.emitted(session, effect.tokens)
            elif isinstance(effect, Send) and isinstance(effect.message, Segment):
                self.sent(effect.message)

    def emitted(self, session: Any, tokens: tuple[int, ...]) -> None:
        node, hits = session.tree.root, list[bool]()
        for token in tokens:
            node = node if node is None else trees.child(session.tree, node, token)
            hits.append(node is not None)
        name = session.request.request
        if not session.decoding and hits.pop(0) and session.session in self.guesses:
            self.begun.setdefault(name, set()).add((session.session, 0))
        self.chosen.setdefault(name, []).extend(hits)

    def sent(self, message: Segment) -> None:
        session = self.sessions[message.session]
        if message.ids[0] < len(session.prefix):
            return
        if session.decoding:
            name = session.request.request
            self.begun.setdefault(name, set()).add((session.session, session.round))
        else:
            self.guesses.add(session.session)


@settings(max_examples=examples(200, quick=80))
@given(
    clusters(),
    requests(3),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=2),
)
def test_request_stats_count_what_was_sent(
    cluster: Cluster, asked: list[Request], losses: list[tuple[int, int]]
) -> None:
    """Under any delays and losses, whether the first token was guessed or not."""
    seen = Onlooker(cluster)
    for request in asked:
        cluster.submit(request)
    lose_links(cluster, losses)
    cluster.world.run(until=BOUND)
    check_after(cluster, asked)
    for name, finish in cluster.world.finished.items():
        stats, chosen = finish.stats, seen.chosen.get(name, [])
        assert (stats["hits"], stats["misses"]) == (sum(chosen), chosen.count(False))
        assert stats["hit_rate"] == (sum(chosen) / len(chosen) if chosen else 0.0)
        assert stats["rounds"] == len(seen.begun.get(name, ()))
        assert stats["passes"] == seen.passes[name]
        for what in ("rows", "dead_rows"):
            assert stats[what] == sum(getattr(one, what) for one in seen.closed.get(name, ()))
