"""Randomness is a function, and a fair one."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.rng import GOLDEN, mix, uniform
from sampling_reference import gumbel

seeds = st.integers(0, 2**64 - 1)
MASK = 2**64 - 1
LARGEST = 0x260CB1A2FC837597


@given(seeds, st.integers(0, 2**20), st.integers(0, 2**18))
def test_the_same_question_has_the_same_answer_inside_the_open_interval(
    seed: int, position: int, token: int
) -> None:
    value = uniform(seed, position, token)
    assert 0.0 < value < 1.0
    assert value == uniform(seed, position, token)
    assert math.isfinite(gumbel(seed, position, token))


def test_the_largest_hash_is_below_one() -> None:
    """The seed whose hash is all ones: rounding made 1 of it, whose noise is infinite."""
    seed = LARGEST
    assert mix((mix((mix(seed) + GOLDEN) & MASK) + GOLDEN) & MASK) == MASK
    assert uniform(seed, 0) == 1 - 2.0**-53
    assert math.isfinite(gumbel(seed, 0, 0))
    assert int(uniform(seed, 0) * 1000) < 1000


def test_golden_values_never_change() -> None:
    """The text of a seed is a promise: these numbers are part of the interface."""
    assert mix(1) == 0x5692161D100B05E5
    assert [round(uniform(7, p, t), 12) for p, t in ((0, 0), (1, 0), (0, 1))] == [
        0.73578501022,
        0.777429686832,
        0.928710689345,
    ]


def test_uniform_fills_its_bins_evenly() -> None:
    bins = [0] * 16
    for position in range(200):
        for token in range(80):
            bins[int(16 * uniform(3, position, token))] += 1
    expected = 16_000 / 16
    chi_square = sum((b - expected) ** 2 / expected for b in bins)
    assert chi_square < 37.7  # 99.9 % quantile of 15 degrees of freedom


def test_gumbel_noise_samples_a_distribution() -> None:
    weights = [0.5, 0.3, 0.15, 0.05]
    counts = [0] * 4
    for position in range(20_000):
        scores = [math.log(w) + gumbel(11, position, t) for t, w in enumerate(weights)]
        counts[scores.index(max(scores))] += 1
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count / 20_000 - weight) < 0.015
