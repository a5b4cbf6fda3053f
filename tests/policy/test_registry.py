"""Policies by what a user writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.policy.level_tree import LevelTree
from asyncspec.policy.registry import POLICIES, parameters, split
from asyncspec.policy.static_tree import StaticTree


@given(st.sampled_from(sorted(POLICIES)))
def test_a_policy_written_out_is_the_same(name: str) -> None:
    written = ",".join(f"{key}={value}" for key, value in parameters(POLICIES[name]).items())
    assert POLICIES[f"{name}:{written}" if written else name] == POLICIES[name]


@given(st.lists(st.sampled_from(sorted(POLICIES)), min_size=1), st.booleans())
def test_a_list_of_names_is_taken_apart(names: list[str], written: bool) -> None:
    def spec(name: str) -> str:
        settings = parameters(POLICIES[name]) if written else {}
        text = ",".join(f"{key}={value}" for key, value in settings.items())
        return f"{name}:{text}" if text else name

    specs = [spec(name) for name in names]
    assert split(",".join(specs)) == specs


def test_parameters_after_a_name() -> None:
    assert POLICIES["pipedec:width=16,children=4"] == LevelTree(width=16, children=4)
    assert POLICIES["static-tree:branching=2x1x2"] == StaticTree(branching=(2, 1, 2))
    assert "pipedec:width=16" in POLICIES
    assert "pipedec:width=0" not in POLICIES
    assert len(POLICIES) == len(list(POLICIES))


@pytest.mark.parametrize("number", [".9", "0.90", "9e-1", "+.9"])
def test_numbers_are_written_as_anywhere(number: str) -> None:
    assert POLICIES[f"lossy-top-p:top_p={number}"] == POLICIES["lossy-top-p:top_p=0.9"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("best", "unknown policy 'best'; there are autoregressive, chain"),
        ("best:width=3", "unknown policy 'best'; there are"),
        (
            "pipedec:childs=2",
            "policy pipedec has no parameter 'childs'; there are: width, children",
        ),
        ("pipedec:", None),
        ("pipedec:width", "policy pipedec: parameter width needs a value, as in width=4"),
        ("pipedec:width=0", "policy pipedec: width: expected int >= 1"),
        ("dip-sd:ahead=true,width=2", "policy dip-sd: ahead needs width=1"),
        ("lossy-top-p:top_p=much", "policy lossy-top-p: top_p: expected float, got str"),
        ("lossy-top-p:top_p=nan", "policy lossy-top-p: top_p"),
        ("chunked:early=maybe", "policy chunked: early: expected bool, got str"),
        (
            "static-tree:branching=" + "x".join(["9223372036854775807"] * 20000),
            "a policy with its parameters has at most 256 characters",
        ),
        ("static-tree:branching=2xx1", "policy static-tree: branching[1]: expected int, got str"),
        ("specpipe:lossy=relaxed", "policy specpipe is lossless and stays so"),
        ("lossy-relaxed:lossy=", "policy lossy-relaxed is lossy and stays so"),
        ("autoregressive:k=1", "policy autoregressive has no parameter 'k'; there are: none"),
    ],
)
def test_invalid_policies_are_refused(spec: str, says: str | None) -> None:
    problem = POLICIES.problem(spec)
    assert problem is None if says is None else problem is not None and problem.startswith(says)
