"""Versions of a token source: sessions keep the one they began with, and texts are the same."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.core.jobs import DraftBatch, Feed, Release, TensorRows
from asyncspec.plugins.toy.source import ToyEagle
from asyncspec.source.base import StateSource
from asyncspec.source.expand import Grower, path_grower
from asyncspec.source.versions import VersionedSource
from asyncspec.testing.sources import check_source
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import FINAL, Expand, Expanded
from cluster import Cluster, ask
from costs import UnitCosts
from laws import SMALL
from source.test_conformance import MODEL, toy_features


def test_a_versioned_source_conforms() -> None:
    check_source(
        lambda: VersionedSource(ToyEagle(MODEL, (FINAL,))), features=toy_features, max_examples=20
    )


class Numbered(StateSource[int]):
    """Proposes its number, whatever the text."""

    def __init__(self, number: int) -> None:
        super().__init__(lambda _: 0, lambda state, _: state + 1)
        self.number = number

    def grower(self, job: Expand) -> Grower:
        return path_grower(lambda path, width: ((self.number,), (math.log(0.5),)))

    def feed(self, job: Feed) -> None:
        return


class Sessions:
    """An ``Observer`` that counts what it sees."""

    def __init__(self) -> None:
        self.lengths: dict[SessionId, int] = {}

    def fed(self, job: Feed) -> None:
        self.lengths.setdefault(job.session, 0)

    def committed(self, job: Expand) -> None:
        assert self.lengths.get(job.session, 0) == job.base
        self.lengths[job.session] = job.base + len(job.committed)

    def ended(self, session: SessionId) -> None:
        del self.lengths[session]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["feed", "grow", "batch", "release", "version"]), st.integers(0, 3)),
    max_size=40,
)


@given(EVENTS)
def test_no_session_sees_a_change_in_the_middle(events: list[tuple[str, int]]) -> None:
    observer = Sessions()
    source, latest = VersionedSource(Numbered(0), observer), 0
    # By session: its version, and its length.
    expected: dict[SessionId, int] = {}
    lengths: dict[SessionId, int] = {}

    def job(session: SessionId) -> Expand:
        expected.setdefault(session, latest)
        base = lengths.get(session, 0)
        lengths[session] = base + 2
        return Expand(session, Version(0), base, (1, 2), depth=2, width=1, count=2)

    def check(answer: object, session: SessionId) -> None:
        assert isinstance(answer, Expanded)
        assert answer.tokens == (expected[session],) * 2
        assert answer.base == lengths[session]

    for event, number in events:
        session = SessionId(number)
        match event:
            case "feed":
                expected.setdefault(session, latest)
                source.run(Feed(session, 0, (TensorRows(None, (0,)),)))
            case "grow":
                check(source.run(job(session)), session)
            case "batch":
                together = [SessionId(i) for i in range(number + 1)]
                answers: Any = source.run(DraftBatch(tuple(map(job, together))))
                for answer, member in zip(answers, together, strict=True):
                    check(answer, member)
            case "release":
                source.run(Release(session))
                expected.pop(session, None)
                lengths.pop(session, None)
            case _:
                latest += 1
                source.take_over(Numbered(latest))
    assert observer.lengths == {session: lengths.get(session, 0) for session in expected}


class ChangingCluster(Cluster):
    """A cluster whose head is replaced every few jobs, by better and by worse ones."""

    def __init__(self, every: int, **options: Any) -> None:
        self.every = every
        super().__init__(UnitCosts(), features=(FINAL,), **options)

    def source_device(self, rank: Any) -> tuple[Any, Any]:
        first = ToyEagle(self.model, self.features, top=0.1)
        source, jobs = VersionedSource(first), 0

        def run(job: Any) -> Any:
            nonlocal jobs
            jobs += 1
            if jobs % self.every == 0:
                source.take_over(
                    ToyEagle(self.model, self.features, top=0.1 + 0.8 * (jobs % 2), seed=jobs)
                )
            return source.run(job)

        return run, first


@settings(max_examples=20)
@given(
    st.integers(1, 9),
    st.sampled_from([*SMALL]),
    st.lists(st.integers(1, 8), min_size=1, max_size=3),
)
def test_texts_are_those_of_the_reference_whatever_takes_over(
    every: int, policy: str, prompts: list[int]
) -> None:
    cluster = ChangingCluster(every, policies=SMALL)
    requests = [
        ask(number, prompt=tuple(range(1, length + 2)), max_new_tokens=12, policy=policy)
        for number, length in enumerate(prompts)
    ]
    for request in requests:
        cluster.submit(request)
    cluster.world.run(until=100_000.0)
    for request in requests:
        assert tuple(cluster.world.tokens[request.request]) == cluster.expected(request)
