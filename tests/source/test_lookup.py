"""Chances of lookups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.source.lookup import MatchRate


@given(st.lists(st.booleans(), max_size=60))
def test_a_rate_is_a_chance_and_follows_what_was_seen(seen: list[bool]) -> None:
    rate = MatchRate()
    for right in seen:
        more, less = rate.counted(right=True), rate.counted(right=False)
        assert 0 < less.chance(3) < more.chance(3) < 1
        rate = more if right else less
