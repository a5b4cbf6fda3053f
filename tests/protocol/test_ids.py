"""Ranks and session ids say which draft node is meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec_protocol.ids import (
    DRAFT,
    MAX_DRAFTS,
    SessionId,
    draft_number,
    draft_rank,
    first_session,
    is_draft,
    owner,
)
from asyncspec_protocol.links import role_of

numbers = st.integers(0, MAX_DRAFTS - 1)
# Milliseconds of a clock that shows the year 2100, and what comes before them.
counters = st.integers(0, 4_102_444_800_000)


@given(numbers, numbers, counters, counters)
def test_a_session_names_its_draft_node(one: int, other: int, count: int, more: int) -> None:
    mine = SessionId(first_session(draft_rank(one)) + count)
    theirs = SessionId(first_session(draft_rank(other)) + more)
    assert owner(mine) == draft_rank(one)
    assert (mine == theirs) == ((one, count) == (other, more))
    assert mine < 2**53


@given(numbers)
def test_draft_numbers_and_ranks_map_to_each_other(number: int) -> None:
    rank = draft_rank(number)
    assert draft_number(rank) == number
    assert is_draft(rank)
    assert role_of(rank, 64) == "draft"


def test_draft_node_0_keeps_rank_and_sessions() -> None:
    assert draft_rank(0) == DRAFT == owner(SessionId(0)) == owner(SessionId(12345))
    assert first_session(DRAFT) == 0


@given(st.integers(1, 65))
def test_no_stage_and_no_source_is_a_draft_node(rank: int) -> None:
    assert not is_draft(rank)


@given(st.one_of(st.integers(max_value=-1), st.integers(min_value=MAX_DRAFTS << 42)))
def test_an_id_that_no_draft_node_issues_has_no_owner(session: int) -> None:
    assert not is_draft(owner(SessionId(session)))


@pytest.mark.parametrize("number", [-1, MAX_DRAFTS])
def test_draft_numbers_are_bounded(number: int) -> None:
    with pytest.raises(ValueError, match="they are 0 to 1023"):
        draft_rank(number)
