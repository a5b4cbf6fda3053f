"""Kinds of sampling: what makes a draft right more or less often."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.sampling import Sampling
from asyncspec_protocol.sampling import Constraint


@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_seeds_make_no_kind(one: int, other: int) -> None:
    assert Sampling(0.8, seed=one).kind == Sampling(0.8, seed=other).kind


@pytest.mark.parametrize(
    "other",
    [
        Sampling(1.0),
        Sampling(1.0, top_p=0.9),
        Sampling(2.0),
        Sampling(repetition_penalty=1.1),
        Sampling(constraint=Constraint(grammar="root ::= 'a'")),
    ],
)
def test_unlike_sampling_is_of_another_kind(other: Sampling) -> None:
    assert other.kind != Sampling().kind


def test_one_candidate_is_greedy() -> None:
    assert Sampling(1.0, top_k=1).kind == Sampling().kind


def test_there_are_few_kinds() -> None:
    assert Sampling(2.0).kind == Sampling(sys.float_info.max).kind
