"""``python tools/compat``: what pip is asked for, and what the table says. Nothing is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from asyncspec.core.errors import UserError
from tools.compat.command import STEPS, Outcome
from tools.compat.requirements import ANY, constraints, dependencies, lower_bound

ROOT = Path(__file__).parents[2]
WANTED = [Requirement("torch>=2.6,<3"), Requirement("transformers>=5.13,<6")]


def test_the_oldest_are_the_lower_bounds_with_one_torch_for_all() -> None:
    assert constraints("oldest", WANTED, "2.13.0") == ["torch==2.13.0", "transformers==5.13"]
    assert constraints("oldest", WANTED, ANY) == ["torch==2.6", "transformers==5.13"]


def test_every_dependency_of_this_project_has_a_lower_bound() -> None:
    found = dependencies(ROOT)
    assert {"torch", "transformers", "aiohttp"} <= {one.name for one in found}
    assert all(lower_bound(one) for one in found)
    with pytest.raises(UserError, match="lower bound"):
        lower_bound(Requirement("torch<3"))


def test_a_step_that_was_not_taken_is_no_success() -> None:
    passed = dict.fromkeys(STEPS, "passed (1 s)")
    assert Outcome("newest", steps=passed).good
    assert not Outcome("newest", steps=passed | {"tests": "failed"}).good
    assert not Outcome("newest", steps={"install": "passed (1 s)"}).good
