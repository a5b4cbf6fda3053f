"""Whatever a stage or a source says ends its link at worst: no job of the draft node's own source
fails, nothing that it sends is refused, and every request that ends can be told."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.core.machine import (
    Abandon,
    Compute,
    Computed,
    Finish,
    Input,
    LinkUp,
    Received,
    Send,
    Submitted,
)
from asyncspec.plugins.toy.model import ToyModel
from asyncspec.plugins.toy.source import ToySource
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import decode, encode
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import (
    Closed,
    Credit,
    Expand,
    Expanded,
    Finished,
    PassTimes,
    Ready,
    Schedule,
    Segment,
    Verdict,
)
from cluster import ask
from effort import examples
from laws import SMALL
from nodes.byzantine_peer import few, mutated, shares
from nodes.machine_driver import Driven, draft

VOCAB = 16
names = st.integers(0, 2)
tokens = st.integers(0, VOCAB - 1)


class Draft:
    """A draft node and its source, which is here or a byzantine node."""

    def __init__(self, driven: Driven) -> None:
        self.driven = driven
        self.source = ToySource(ToyModel(vocab=VOCAB))
        self.jobs: deque[Any] = deque()
        self.asked: list[Expand] = []
        self.sent: list[Segment] = []

    def receive(self, peer: int, message: Any) -> None:
        try:
            self.feed(Received(Rank(peer), decode(encode(message)).message))
        except RemoteProtocolError:
            return

    def feed(self, event: Input) -> None:
        for effect in self.driven.feed(event):
            if isinstance(effect, Compute):
                self.jobs.append(effect.job)
            elif isinstance(effect, Abandon):
                self.source.abandon(effect.job)  # type: ignore[arg-type]
            elif isinstance(effect, Send):
                decode(encode(effect.message))
                if isinstance(effect.message, Segment):
                    self.sent.append(effect.message)
                elif isinstance(effect.message, Expand):
                    self.asked.append(effect.message)
            elif isinstance(effect, Finish):
                decode(encode(Finished(effect.request, effect.reason, effect.detail, effect.stats)))

    def work(self) -> None:
        if self.jobs:
            job = self.jobs.popleft()
            if (result := self.source.run(job)) is not None:
                self.feed(Computed(job, result, 0.5))


@st.composite
def verdicts(draw: st.DrawFn, sent: list[Segment]) -> Verdict:
    """Of a segment that was sent."""
    one = draw(st.sampled_from(sent))
    words = tuple(draw(tokens) for _ in one.ids)
    return Verdict(
        one.session,
        one.segment,
        draw(st.integers(0, 1)),
        one.ids,
        words,
        stage_seconds=draw(shares),
    )


@st.composite
def answers(draw: st.DrawFn, asked: list[Expand]) -> Expanded:
    one = draw(st.sampled_from(asked))
    size = draw(st.integers(0, 5))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(size))
    words = tuple(draw(tokens) for _ in range(size))
    scores = tuple(-draw(shares) for _ in range(size))
    base = one.base + len(one.committed)
    return Expanded(one.session, one.version, base, parents, words, scores, draw(shares))


seconds = st.tuples(shares, shares)
others = st.one_of(
    st.builds(Credit, st.integers(0, 20), few, shares),
    st.builds(Ready, st.just(1), st.booleans(), st.sampled_from([0, 0, 1000]), names, names),
    st.builds(PassTimes, st.just(1), st.just((1.0, 8.0)), seconds, shares, shares),
    st.builds(Schedule, names, few, st.just(0), st.just(1), st.integers(1, 4)),
    st.builds(Closed, names, st.just(1), few, few, few, shares, few),
)


@settings(max_examples=examples(300, quick=120))
@given(st.data())
def test_no_job_of_a_draft_node_fails(data: st.DataObject) -> None:
    away = data.draw(st.booleans())
    driven = draft(vocab=VOCAB, source=Rank(2) if away else None)
    node = Draft(driven)
    if away:
        node.feed(LinkUp(Rank(2)))
    for request in range(2):
        policy = data.draw(st.sampled_from(sorted(SMALL)))
        node.feed(Submitted(ask(request, prompt=(1, 2, 3), policy=policy)))
    for what in data.draw(st.lists(st.sampled_from("vvvvddddeo"), max_size=40)):
        if what == "v" and node.sent:
            node.receive(1, data.draw(mutated(verdicts(node.sent))))
        elif what == "e" and node.asked:
            node.receive(2, data.draw(mutated(answers(node.asked))))
        elif what == "o":
            node.receive(1, data.draw(mutated(others)))
        else:
            node.work()
