"""Chances as they came true in a session, for policies that ask for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.backend.draft_model import ModelSource, SourceSession
from asyncspec.core.tree import TIP
from asyncspec.source.calibrated import FirstChoices
from asyncspec.source.expand import Grower, Proposal, path_grower
from asyncspec.source.mixture import Calibration
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded

counts = st.builds(
    lambda seen, true, expected: Calibration(float(seen), seen * true, seen * expected),
    st.integers(0, 500),
    st.floats(0, 1),
    st.floats(0, 1),
)
chances = st.lists(st.floats(1e-6, 1), min_size=1, max_size=8).map(
    lambda weights: sorted((w / max(1.0, sum(weights)) for w in weights), reverse=True)
)


@given(counts, chances)
def test_corrected_chances_are_a_distribution_in_the_same_order(
    known: Calibration, stated: list[float]
) -> None:
    proposal = (range(len(stated)), [math.log(p) for p in stated])
    tokens, log_probs = FirstChoices(known).corrected(proposal)
    corrected = [math.exp(one) for one in log_probs]
    assert tokens == proposal[0]
    assert sum(corrected) <= 1 + 1e-9
    assert corrected == sorted(corrected, reverse=True)
    assert corrected[0] >= stated[0] * (1 - 1e-9)
    assert all(c <= p * (1 + 1e-9) for c, p in zip(corrected[1:], stated[1:], strict=True))


@given(counts)
def test_nothing_proposed_stays_nothing(known: Calibration) -> None:
    assert FirstChoices(known).corrected(((), ())) == ((), ())


STATED, SECOND = 0.3, 0.2


class Timid(ModelSource[SourceSession]):
    """States .3 for the token one above the last, and .2 for the one two above."""

    def __init__(self) -> None:
        super().__init__(context=10_000)

    def open_session(self) -> SourceSession:
        return SourceSession()

    def advance(self, session: SourceSession, job: Expand) -> Iterator[Any]:
        session.tip_token = job.committed[-1] if job.committed else session.tip_token
        yield from ()

    def grower(self, job: Expand) -> Grower:
        tip = self._sessions[job.session].tip_token

        def successors(path: tuple[int, ...], width: int) -> Proposal:
            last = path[-1] if path else tip
            return [last + 1, last + 2], [math.log(STATED), math.log(SECOND)]

        return path_grower(successors)


def drafted(source: Timid, job: Expand) -> Expanded:
    answer = source.run(job)
    assert isinstance(answer, Expanded)
    return answer


def first_chance(answer: Expanded, token: int) -> float:
    """Of the tip's child ``token``."""
    pairs = zip(answer.parents, answer.tokens, answer.scores, strict=True)
    return next(math.exp(score) for parent, one, score in pairs if (parent, one) == (TIP, token))


def written(source: Timid, steps: Sequence[int], *, calibrated: bool) -> Expand:
    """The request after a text that goes on by such steps, each after a request of two levels."""
    job = Expand(SessionId(0), Version(0), 0, (5,), 2, 2, 6, calibrated=calibrated)
    for step in steps:
        drafted(source, job)
        end = job.base + len(job.committed)
        job = replace(job, base=end, committed=(job.committed[-1] + step,))
    return job


@pytest.mark.parametrize(("share", "near"), [(1.0, 1.0), (0.75, 0.75)])
def test_chances_follow_what_came_true(share: float, near: float) -> None:
    source = Timid()
    steps = [1 if i * share % 1 < share else 2 for i in range(200)]
    job = written(source, steps, calibrated=True)
    right = steps.count(1) / len(steps)
    assert right == pytest.approx(share, abs=0.01)
    assert first_chance(drafted(source, job), job.committed[-1] + 1) == pytest.approx(
        near, abs=0.05
    )


def test_sure_paths_go_before_unlikely_siblings() -> None:
    """The best three nodes: the path, once it is known to be sure."""
    source = Timid()
    start = Expand(SessionId(1), Version(0), 0, (5,), 3, 2, 3, calibrated=True)
    assert drafted(source, start).tokens == (6, 7, 7)
    job = replace(written(source, [1] * 50, calibrated=True), depth=3, count=3)
    tip = job.committed[-1]
    assert drafted(source, job).tokens == (tip + 1, tip + 2, tip + 3)


def test_others_get_chances_as_stated_and_are_not_counted() -> None:
    source = Timid()
    job = written(source, [1] * 50, calibrated=False)
    assert first_chance(drafted(source, job), job.committed[-1] + 1) == pytest.approx(STATED)


def test_the_first_choice_loses_no_chance() -> None:
    source = Timid()
    job = written(source, [2] * 50, calibrated=True)
    assert first_chance(drafted(source, job), job.committed[-1] + 1) == pytest.approx(STATED)


def test_sessions_learn_apart() -> None:
    source = Timid()
    written(source, [1] * 50, calibrated=True)
    other = Expand(SessionId(1), Version(0), 0, (5,), 1, 2, 2, calibrated=True)
    assert first_chance(drafted(source, other), 6) == pytest.approx(STATED)
