"""The paper's constants and formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.errors import UserError
from asyncspec.plugins.dipsd.evaluate import evaluate
from asyncspec.plugins.dipsd.model import (
    SERVER,
    TARGET,
    Plan,
    Tables,
    Verifier,
    capacity,
    check_memory,
    even_stages,
    expected_tokens,
    paper,
)
from asyncspec.plugins.dipsd.simulation import drawn_tokens


def test_the_profiles_give_the_papers_times() -> None:
    tables = Tables(paper(1))
    assert tables.draft[0][1] - 3 == pytest.approx(33.915, abs=5e-4)
    assert tables.passing(tables.rows[512][1]) == pytest.approx(95.683, abs=5e-4)
    assert tables.passing(tables.rows[512][2]) - tables.passing(tables.rows[512][1]) == (
        pytest.approx(0.575, abs=1e-3)
    )


def test_the_memory_holds_49_users_at_512() -> None:
    verifier = paper().verifier
    assert int(capacity(verifier) // 512) == 49
    assert TARGET.weight_bytes(64) == pytest.approx(46.98e9, rel=1e-3)
    tables = Tables(paper(50))
    assert tables.fits(range(49))
    assert not tables.fits(range(50))


def test_where_all_caches_must_fit_too_many_users_are_refused() -> None:
    crowd = paper(50)
    everybody = Verifier(TARGET, crowd.verifier.stages, 0.0, "all")
    with pytest.raises(UserError, match="the users' caches hold 25600 positions"):
        check_memory(crowd.__class__(crowd.users, everybody))
    check_memory(crowd)


@given(st.floats(0, 0.99), st.integers(1, 20))
def test_a_round_brings_one_token_and_what_was_accepted(alpha: float, length: int) -> None:
    by_sum = sum(alpha**k for k in range(length + 1))
    assert expected_tokens(alpha, length) == pytest.approx(by_sum)
    assert expected_tokens(1.0, length) == length + 1


@pytest.mark.parametrize("alpha", [0.3, 0.78, 0.95])
def test_the_acceptance_model_is_what_draws_give(alpha: float) -> None:
    drawn = [drawn_tokens(alpha, 7, 1, round_, 0) for round_ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(expected_tokens(alpha, 7), rel=0.02)
    assert set(drawn) <= set(range(1, 9))


@given(st.integers(1, 64))
def test_even_stages_are_the_whole(count: int) -> None:
    stages = even_stages(TARGET, SERVER, count)
    assert sum(stage.layers for stage in stages) == TARGET.layers
    assert sum(stage.fixed_ms for stage in stages) == pytest.approx(SERVER.fixed_ms)
    one, many = (Tables(paper(1, stages=n)) for n in (1, count))
    assert many.passing(1e12) == pytest.approx(one.passing(1e12))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(((0,),), (1, 1)),
        Plan(((0, 1), (1,)), (1, 1)),
        Plan(((0, 1), ()), (1, 1)),
        Plan(((0, 1),), (1,)),
        Plan(((0, 1),), (0, 1)),
        Plan(((0, 1),), (21, 1)),
    ],
)
def test_invalid_plans_are_refused(plan: Plan) -> None:
    with pytest.raises(ValueError):
        evaluate(plan, Tables(paper(2)))
