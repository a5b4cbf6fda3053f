"""Any input in any state is handled, or is a protocol error; never a KeyError.

Inputs are drawn around what makes sense, so that many of them get far before they go wrong.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.core.jobs import Admit, DraftBatch, Forward, SamplerOutput
from asyncspec.core.machine import (
    Cancelled,
    Compute,
    Computed,
    Input,
    LinkDown,
    LinkUp,
    Received,
    Stopped,
    Submitted,
    TimerFired,
)
from asyncspec_nodes.roles.source import SourceConfig, SourceMachine, SourceState
from asyncspec_protocol.errors import ProtocolError
from asyncspec_protocol.ids import DRAFT, Rank
from asyncspec_protocol.messages import (
    FINAL,
    Close,
    Closed,
    Credit,
    Expand,
    Expanded,
    Features,
    Floor,
    Heartbeat,
    Open,
    PassTimes,
    PruneIndices,
    Rates,
    Ready,
    Schedule,
    Segment,
    Verdict,
)
from cluster import ask
from effort import examples
from laws import SMALL, check_draft, check_stage
from nodes.machine_driver import Driven, draft, stage
from protocol.message_strategies import messages as every_message

small = st.integers(0, 3)
shares = st.floats(0, 1)
nodes = st.integers(0, 12)
several = st.lists(nodes, max_size=4).map(tuple)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    ids = draw(st.lists(nodes, min_size=1, max_size=4, unique=True))
    parents = tuple(draw(st.integers(-1, n - 1)) for n in ids)
    tokens = tuple(ids) if draw(st.booleans()) else ()
    aux_states = draw(st.sampled_from([0, 0, 1]))
    return Segment(draw(small), draw(small), draw(small), tuple(ids), parents, tokens, aux_states)  # type: ignore[arg-type]


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    ids = draw(several)
    words = tuple(draw(small) for _ in ids)
    featured = draw(st.one_of(st.just(ids), st.just((0, *ids)), st.just(()), several))
    return Verdict(draw(small), draw(small), draw(small), ids, words, featured)  # type: ignore[arg-type]


wanted = st.sampled_from([(), (), (FINAL,), (1,), (0, 2), (7,)])
ranks = st.integers(0, 3)
messages: st.SearchStrategy[Any] = st.one_of(
    every_message,  # most often about sessions that nobody has opened
    segments(),
    segments(),
    verdicts(),
    st.builds(PruneIndices, small, small, nodes, several, several),
    st.builds(
        Open,
        small,
        st.integers(1, 4),
        st.just(20),
        small,
        st.just(0.0),
        small,
        st.just(1.0),
        presence_penalty=st.sampled_from([0.0, 1.0]),
        features=wanted,
    ),
    st.builds(Close, small),
    st.builds(Floor, small),
    st.builds(Rates, small, small, *[shares] * 7),
    st.builds(Schedule, small, small, st.just(0), st.just(1), st.integers(1, 4)),
    st.builds(PassTimes, small, st.just((1.0, 8.0)), st.tuples(shares, shares), shares),
    st.builds(Ready, ranks, st.booleans(), features=wanted),
    st.builds(Features, small, small, small),
    st.builds(Expand, small, small, small, several, small, small, small),
    st.builds(Credit, st.integers(0, 20)),
    st.builds(Closed, small, ranks, small, small, small, st.just(0.1), small),
    st.builds(Heartbeat, st.just(1.0)),
)
inputs: st.SearchStrategy[Any] = st.one_of(
    st.builds(Received, ranks, messages, st.sampled_from([None, "hidden"]), shares),
    st.builds(Received, ranks, messages, st.sampled_from([None, "hidden"]), shares),
    st.builds(LinkUp, ranks),
    st.builds(LinkDown, ranks),
    st.builds(TimerFired, st.sampled_from(["rejoin", "stats:0", "batch deadline", "tea"])),
    st.builds(Cancelled, small),
    st.builds(Stopped, small, small),
    st.just("device"),
    small.map(lambda i: Submitted(ask(i, prompt=(1, 2), policy=sorted(SMALL)[i]))),
)


def answer(job: Any, draw: Any, *, featured: bool) -> Input:
    """What a device might say to a job; ``featured``: on the last stage, in such a session."""
    if isinstance(job, Forward) and featured:
        return Computed(
            job, SamplerOutput(tuple(draw(small) for _ in job.sampled_rows), "features")
        )
    if isinstance(job, Forward):
        return Computed(
            job, tuple(draw(small) for _ in job.sampled_rows) if job.sampled_rows else "hidden"
        )
    if isinstance(job, DraftBatch):
        return Computed(job, tuple(tree(one, draw) for one in job.jobs))
    return Computed(job, tree(job, draw))


def tree(job: Expand, draw: Any) -> Expanded:
    length = draw(st.integers(0, 4))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(length))
    base = job.base + len(job.committed)
    words = tuple(range(length))
    scores = tuple(-float(i) for i in range(length))
    return Expanded(job.session, job.version, base, parents, words, scores)


def step_through(driven: Driven, data: st.DataObject, check: Any, featured: set[int]) -> None:
    """``featured``: sessions whose passes end in features here."""
    jobs: list[Any] = []
    for event in data.draw(st.lists(inputs, max_size=25)):
        if event == "device":
            if not jobs:
                continue
            job = jobs.pop(0)
            event = answer(job, data.draw, featured=getattr(job, "session", -1) in featured)
        before = driven.state
        try:
            effects = driven.feed(event)
        except ProtocolError:
            assert driven.state is before, "an error leaves the state as it was"
            continue
        check(driven.state)
        asked = [e.job for e in effects if isinstance(e, Compute)]
        jobs += [job for job in asked if isinstance(job, Forward | Expand | DraftBatch)]
        if getattr(driven.machine.config, "last", False):
            featured |= {job.session for job in asked if isinstance(job, Admit) and job.features}


@settings(max_examples=examples(200, quick=80))
@given(st.data())
def test_a_stage_handles_anything(data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 3))
    driven = stage(
        data.draw(st.integers(1, stages)),
        stages,
        window=data.draw(st.integers(1, 4)),
        features=(features := data.draw(st.sampled_from([(), (FINAL,), (1,), (0,)]))),
    )
    last = driven.machine.config.last
    step_through(driven, data, check_stage, {0} if features and last else set())


@settings(max_examples=examples(200, quick=80))
@given(st.data())
def test_a_draft_node_handles_anything(data: st.DataObject) -> None:
    stages, features, apart = data.draw(st.tuples(st.integers(1, 3), wanted, st.booleans()))
    driven = draft(
        stages=stages,
        credit=data.draw(st.integers(1, 9)),
        features=() if apart else features,
        source=Rank(stages + 1) if apart else None,
        awaits_features=apart and bool(features),
    )
    if apart:
        source = Rank(stages + 1)
        driven.feed(LinkUp(source), Received(source, Ready(source, True, features=features)))
    driven.feed(Submitted(ask(0, prompt=(1, 2), policy=data.draw(st.sampled_from(sorted(SMALL))))))
    step_through(driven, data, check_draft, set())


@settings(max_examples=examples(200, quick=80))
@given(st.data())
def test_a_source_handles_anything(data: st.DataObject) -> None:
    features = data.draw(wanted)
    driven = Driven(SourceMachine(SourceConfig(Rank(2), 9, sessions=2, features=features)))
    driven.feed(LinkUp(DRAFT))
    step_through(driven, data, check_source, set())


def check_source(state: SourceState) -> None:
    """No session is further than its features, which are held until a request."""
    for session in state.sessions.values():
        if state.config.features:
            assert session.length <= session.featured + 1
        assert sum(len(rows.rows) for rows in session.fed) <= session.featured
