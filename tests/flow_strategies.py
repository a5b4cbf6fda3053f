"""Rounds to choose from: shapes, chances by rank, and costs."""

from __future__ import annotations

from hypothesis import strategies as st

from asyncspec.policy.flow.acceptance import RANKS
from asyncspec.policy.flow.mean_tree import LEVELS, ROWS, RoundShape
from asyncspec.policy.flow.rounds import (
    RoundCosts,
)

shapes = st.builds(
    RoundShape, st.sampled_from(LEVELS), st.sampled_from(LEVELS[1:]), st.sampled_from(ROWS)
)

profiles = st.lists(st.floats(0, 1), min_size=1, max_size=RANKS).map(
    lambda weights: sorted((w / max(1.0, sum(weights)) for w in weights), reverse=True)
)


costs = st.builds(
    lambda fixed, row, stages, latency, level: RoundCosts(
        lambda rows: fixed + row * rows, lambda rows: stages * (fixed + row * rows) + latency, level
    ),
    st.floats(0.1, 2),
    st.floats(0, 0.2),
    st.integers(1, 16),
    st.floats(0, 4),
    st.floats(0, 2),
)


any_shapes = st.builds(
    RoundShape, st.sampled_from(LEVELS), st.sampled_from(LEVELS), st.sampled_from(ROWS)
)
