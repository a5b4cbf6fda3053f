"""Planners: which sessions are verified together, and how long their drafts are.

A planner is asked at run time by the first stage (``asyncspec_nodes.roles.verify.planning``) for
the sessions whose policy is ``plannable``. Packages register an object with the methods of
``Planner`` under the entry point group ``asyncspec.planners``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from asyncspec.registry import Registry
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Rates

MAX_SECONDS, MAX_JITTER = 1e3, 1.0
"""Bounds of any time and of any relative deviation, whatever a peer reports."""

StageCosts = Sequence[tuple[float, float, float]]
"""By stage: seconds of a pass, seconds of each of its rows, and their relative deviation."""


class PlanRequest(Protocol):
    """A planner's input, compared by value. Each planner has a struct of its own."""

    @property
    def sessions(self) -> tuple[SessionId, ...]:
        """The sessions to plan for, in the order of ``Decision``'s lists."""


class Decision(Struct, frozen=True):
    """Draft lengths and batches for the sessions of a request. Without batches, greedy batching is
    better: every session is verified as soon as it has drafted. Rates in tokens a second."""

    # Tokens of a draft, by session.
    lengths: tuple[int, ...]
    # Batches, verified in turn: each has places of sessions in the request.
    groups: tuple[tuple[int, ...], ...]
    # Milliseconds in which all batches are verified once.
    period_ms: float
    # Forecasts of the best plan and of greedy batching with lengths of its own, in all and by
    # session.
    planned: float
    greedy: float
    greedy_lengths: tuple[int, ...]
    greedy_by_user: tuple[float, ...]


Q = TypeVar("Q", bound=PlanRequest)


@runtime_checkable
class Planner(Protocol[Q]):
    """What the first stage asks; ``Q``: the planner's own kind of request."""

    def request(self, measured: Sequence[Rates], stages: StageCosts, batch_rows: int) -> Q:
        """The input for sessions with these rates.

        Arguments:
            measured: by session, what its draft node has measured.
            stages: by stage.
            batch_rows: rows of a pass at most; 0: no bound.
        """

    def drifted(self, old: Q, new: Q) -> bool:
        """Whether a plan for the one may not be good for the other."""

    def decide(self, request: Q) -> Decision:
        """Plan. It may take a second: it runs on a thread of its own."""


DEFAULT_PLANNER = "dip-sd"

PLANNERS: Registry[Planner[Any]] = Registry("asyncspec.planners", "planner", Planner)
"""The installed planners."""
