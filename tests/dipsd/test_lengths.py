"""The length step against all lengths there are."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.plugins.dipsd.evaluate import BatchTimes, batch_times
from asyncspec.plugins.dipsd.model import Budget, Deployment, Groups, Tables
from asyncspec.plugins.dipsd.optimizer.association import associations
from asyncspec.plugins.dipsd.optimizer.lengths import LengthSweep, best_lengths, common_length
from dipsd.deployments import deployments


def two_terms(batches: list[BatchTimes], tables: Tables) -> float:
    """The period the planners go by, written once more."""
    loops = [b.draft_ms + b.verify_ms for b in batches]
    sums = [sum(b.stages_ms[p] for b in batches) for p in range(len(tables.fixed))]
    return max(*loops, *sums)


def by_enumeration(tables: Tables, groups: Groups) -> float:
    """Tokens a ms with the best of all lengths."""
    best = 0.0
    for lengths in product(range(1, tables.longest + 1), repeat=tables.users):
        tokens = sum(tables.gain[m][k] for m, k in enumerate(lengths))
        batches = [batch_times(g, lengths, tables) for g in groups]
        best = max(best, tokens / two_terms(batches, tables))
    return best


@st.composite
def associated(draw: st.DrawFn) -> tuple[Deployment, Groups]:
    # Where the verifier limits, its knapsack decides; that takes fast devices.
    deployment = draw(deployments(most=4, longest=5, fast=draw(st.booleans())))
    return deployment, draw(st.sampled_from(list(associations(len(deployment.users)))))


@given(associated())
@settings(max_examples=200)
def test_lengths_equal_exhaustive_search(case: tuple[Deployment, Groups]) -> None:
    tables, groups = Tables(case[0]), case[1]
    found = best_lengths(tables, groups)
    if not tables.all_fit(groups):
        assert found is None
        return
    assert found is not None
    assert found.ratio == pytest.approx(by_enumeration(tables, groups), rel=1e-9)
    # The lengths themselves bring what is said of them.
    lengths = found.plan.lengths
    batches = [batch_times(g, lengths, tables) for g in groups]
    tokens = sum(tables.gain[m][k] for m, k in enumerate(lengths))
    assert tokens / two_terms(batches, tables) == pytest.approx(found.ratio, rel=1e-9)
    assert found.ratio >= common_length(tables, groups)[0] * (1 - 1e-9)


@given(associated())
@settings(max_examples=100)
def test_dinkelbachs_ratios_only_rise(case: tuple[Deployment, Groups]) -> None:
    tables, groups = Tables(case[0]), case[1]
    found = best_lengths(tables, groups)
    if found is not None:
        q = common_length(tables, groups)[0]
        ceiling = sum(gain[-1] for gain in tables.gain) / q
        sweep = LengthSweep(tables, groups, ceiling, Budget(float("inf")))
        while (better := sweep.best(q, 1e-12 * ceiling * q)) is not None:
            assert better.tokens / better.period > q
            q = better.tokens / better.period
        assert q == pytest.approx(found.ratio, rel=1e-9)
        # What is to be beaten is either beaten or not there.
        assert best_lengths(tables, groups, found.ratio * (1 + 1e-6)) is None
        again = best_lengths(tables, groups, found.ratio * (1 - 1e-6))
        assert again is not None
        assert again.ratio == pytest.approx(found.ratio, rel=1e-9)
