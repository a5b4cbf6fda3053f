"""The virtual clock: what is to happen does so once, in order, and never in the past."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.sim.network import VirtualClock

moments = st.floats(-5, 50)


@given(st.lists(st.tuples(moments, moments, st.booleans()), max_size=20))
def test_events_happen_in_order_unless_they_are_cancelled(
    issued: list[tuple[float, float, bool]],
) -> None:
    """Each asks for another when it happens, which may be for a time that is past."""
    clock, seen = VirtualClock(), []

    def happen(name: int, after: float) -> None:
        seen.append((clock.now, name))
        if after:
            clock.at(after, happen, name + 100, 0.0)

    expected = set()
    for name, (when, after, cancelled) in enumerate(issued):
        number = clock.at(when, happen, name, after)
        if cancelled:
            clock.cancel(number)
        else:
            first = max(0.0, when)
            expected.add((first, name))
            if after:
                expected.add((max(first, after), name + 100))
    last = (0.0, -1)
    while (event := clock.take()) is not None:
        when, number, action, with_what = event
        assert (when, number) > last
        last = clock.now, _ = when, number
        action(*with_what)
    assert len(seen) == len(expected)
    assert set(seen) == expected
    assert clock.take() is None
