"""What every planner owes the first stage."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.planning import Decision, Planner
from asyncspec.testing.examples import unhurried
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.limits import MAX_DRAFT_LENGTH
from asyncspec_protocol.messages import Rates

_SHARES = st.floats(0, 1)
_SECONDS = st.floats(0, 10)


@st.composite
def rates(draw: st.DrawFn, session: int) -> Rates:
    """What a draft node may report of a session."""
    alpha, mean, high = sorted(draw(st.tuples(_SHARES, _SHARES, _SHARES)))
    return Rates(
        SessionId(session),
        rounds=draw(st.integers(1, 99)),
        alpha=alpha,
        token_seconds=draw(_SECONDS),
        call_seconds=draw(_SECONDS),
        link_seconds=draw(_SECONDS),
        jitter=draw(_SHARES),
        mean=mean,
        high=high,
        link_jitter=draw(_SHARES),
    )


def check_planner(planner: Planner[Any], max_sessions: int = 5, max_examples: int = 100) -> None:
    """Check a planner on generated measurements.

    Arguments:
        planner: asked for plans on one to three stages.
        max_sessions: sessions of a plan, at most.
        max_examples: measurements to try.

    Raises:
        AssertionError: it breaks a law.
    """
    stages = st.lists(st.tuples(st.floats(1e-4, 10), _SECONDS, _SHARES), min_size=1, max_size=3)

    @unhurried(max_examples)
    @given(st.data(), st.integers(1, max_sessions), stages, st.sampled_from((0, 16, 64)))
    def check(
        data: st.DataObject, count: int, costs: list[tuple[float, float, float]], batch_rows: int
    ) -> None:
        measured = [data.draw(rates(7 * number)) for number in range(count)]
        request = planner.request(measured, costs, batch_rows)
        assert request == planner.request(measured, costs, batch_rows)
        assert request.sessions == tuple(report.session for report in measured)
        assert not planner.drifted(request, request)
        check_decision(planner.decide(request), count, batch_rows)

    check()


def check_decision(decision: Decision, sessions: int, batch_rows: int) -> None:
    """Every session has a length and, where there are batches, is in one of them, which fits a
    pass: a row for each drafted token and one for the root."""
    for lengths in (decision.lengths, decision.greedy_lengths):
        assert len(lengths) == sessions
        assert all(1 <= length <= MAX_DRAFT_LENGTH for length in lengths)
    assert len(decision.greedy_by_user) == sessions
    forecasts = (decision.planned, decision.greedy, *decision.greedy_by_user)
    assert all(math.isfinite(rate) and rate >= 0 for rate in forecasts)
    if not decision.groups:
        return
    assert decision.period_ms > 0
    assert sorted(place for group in decision.groups for place in group) == [*range(sessions)]
    for group in decision.groups:
        assert group
        rows = sum(decision.lengths[place] + 1 for place in group)
        assert not batch_rows or rows <= batch_rows
