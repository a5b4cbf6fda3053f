"""The conformance suite over every planner."""

from __future__ import annotations

import pytest

from asyncspec.planning import PLANNERS
from asyncspec.testing.planners import check_planner


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_conforms(name: str) -> None:
    check_planner(PLANNERS[name])
