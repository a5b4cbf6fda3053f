"""Every conformance suite notices an object that breaks a law."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings

from asyncspec.core.jobs import Feed, TensorRows
from asyncspec.core.tree import Shape
from asyncspec.planning import PLANNERS, Decision, PlanRequest, StageCosts
from asyncspec.policy.base import Growth, Policy, View
from asyncspec.policy.chain import CHAIN
from asyncspec.source.base import StateSource
from asyncspec.source.expand import Grower, path_grower
from asyncspec.testing.dialects import check_dialect
from asyncspec.testing.planners import check_planner
from asyncspec.testing.policies import check_policy
from asyncspec.testing.sources import check_source
from asyncspec_nodes.http.api.completions import CompletionRequest
from asyncspec_nodes.http.dialects import Dialect
from asyncspec_protocol.ids import NodeId
from asyncspec_protocol.messages import Expand, Rates


@pytest.fixture(autouse=True)
def unshrunk() -> Iterator[None]:
    """A failing example is all that is asked for, not the smallest."""
    profile = settings.get_current_profile_name()
    settings.load_profile("mutants")
    yield
    settings.load_profile(profile)


class Idle(Policy, frozen=True):
    """Never sends anything."""

    def max_tree_nodes(self, stages: int) -> int:
        return 1

    def grow(self, view: View) -> Growth | None:
        return None

    def next_segment(self, view: View) -> tuple[NodeId, ...]:
        return ()


class Greedy(Idle, frozen=True):
    """Drafts also where no level can become part of the answer."""

    def grow(self, view: View) -> Growth | None:
        return Growth(Shape(1, 1, 1), adopt=1)


class Childless(Idle, frozen=True):
    """Sends the newest node, whatever is above it."""

    def next_segment(self, view: View) -> tuple[NodeId, ...]:
        return view.unsent[-1:]


@pytest.mark.parametrize("policy", [Idle(), Greedy(), Childless()])
def test_policies(policy: Policy) -> None:
    with pytest.raises(AssertionError):
        check_policy(policy)


class Gossip(StateSource[int]):
    """Proposes the first token that anybody committed."""

    def __init__(self, *log_probs: float) -> None:
        super().__init__(lambda job: 0, self._extend)
        self._first: list[int] = []
        self._log_probs = log_probs

    def _extend(self, count: int, token: int) -> int:
        self._first = self._first or [token]
        return count + 1

    def grower(self, job: Expand) -> Grower:
        tokens = self._first * len(self._log_probs)
        return path_grower(lambda path, width: (tokens, self._log_probs))


@pytest.mark.parametrize("log_probs", [(-0.5,), (-0.5, -0.7)])
def test_sources(log_probs: tuple[float, ...]) -> None:
    with pytest.raises(AssertionError):
        check_source(lambda: Gossip(*log_probs))


class Careless(StateSource[int]):
    """Takes any features, and reads none."""

    def __init__(self) -> None:
        super().__init__(lambda job: 0, lambda count, token: count + 1)

    def feed(self, job: Feed) -> None:
        pass

    def grower(self, job: Expand) -> Grower:
        return path_grower(lambda path, width: ((1,), (-0.5,)))


def test_sources_with_features() -> None:
    check_source(Careless)
    with pytest.raises(AssertionError, match="without features"):
        check_source(Careless, features=lambda text: TensorRows(text, (*range(len(text) - 1),)))


class Forgetful:
    """Plans for the first session alone."""

    _planner = PLANNERS["dip-sd"]

    def request(self, measured: Sequence[Rates], stages: StageCosts, batch_rows: int) -> Any:
        return self._planner.request(measured[:1], stages, batch_rows)

    def drifted(self, old: PlanRequest, new: PlanRequest) -> bool:
        return self._planner.drifted(old, new)

    def decide(self, request: PlanRequest) -> Decision:
        return self._planner.decide(request)


def test_planners() -> None:
    with pytest.raises(AssertionError):
        check_planner(Forgetful())


class Strict(CompletionRequest, frozen=True):
    """Fails on prompts that are no text."""

    def check(self) -> None:
        super().check()
        assert isinstance(self.prompt, str)


@pytest.mark.parametrize(
    ("dialect", "bodies"),
    [
        (Dialect(endpoints={"/mine": CompletionRequest}), {}),
        (Dialect(endpoints={"/mine": CompletionRequest}), {"/mine": [{"prompt": 5}]}),
        (Dialect(endpoints={"/mine": Strict}), {"/mine": [{"prompt": "x"}]}),
        (Dialect(endpoints={"/v1/completions": CompletionRequest}), {"/v1/completions": [{}]}),
        (Dialect(public=frozenset({"/mine"})), {}),
    ],
)
def test_dialects(dialect: Dialect, bodies: Any) -> None:
    with pytest.raises(AssertionError):
        check_dialect(dialect, bodies)


def test_no_example_is_too_slow() -> None:
    """Under load any takes longer than Hypothesis allows where nobody says how long."""
    settings.register_profile("hurried", settings(), deadline=1e-3)
    settings.load_profile("hurried")
    check_policy(CHAIN, max_examples=5)
