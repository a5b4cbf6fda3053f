"""The sweeps behind DiP-SD's Figures 3 and 4: one factor at a time, everything compared.

Figure 3 has equal users, Figure 4 unequal ones; the ranges of the paper's sweeps are not public, so
these are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from asyncspec.plugins.dipsd.evaluate import evaluate
from asyncspec.plugins.dipsd.model import ALPHA, LINK_MS, PREFIX, Deployment, Tables, paper
from asyncspec.plugins.dipsd.optimizer.baselines import BASELINES, algorithm1
from asyncspec.plugins.dipsd.optimizer.planner import plan_best
from asyncspec.plugins.dipsd.simulation import best_greedy

UNEQUAL = 12


class Curve(NamedTuple):
    """A sweep: its name, what is swept, the values, and the deployment at each of them."""

    name: str
    title: str
    across: str
    values: Sequence[float]
    at: Callable[[float], Deployment]


class Point(NamedTuple):
    """Tokens a second by who plans."""

    value: float
    rates: dict[str, float | None]
    batches: int


def _spread(change: Callable[[Deployment, int, float], object], value: float) -> Deployment:
    """Twelve users, each changed by a share from -1 to 1, evenly spread and shuffled."""
    base = paper(UNEQUAL)
    shares = [2 * m / (UNEQUAL - 1) - 1 for m in range(UNEQUAL)]
    Random(1).shuffle(shares)
    users = []
    for m, share in enumerate(shares):
        fields = change(base, m, share * value)
        assert isinstance(fields, dict)
        users.append(replace(base.users[m], **fields))
    return replace(base, users=tuple(users))


def _alphas(_: Deployment, __: int, by: float) -> object:
    return {"alpha": ALPHA + by}


def _devices(base: Deployment, m: int, by: float) -> object:
    return {"token_ms": base.users[m].token_ms * 2**by}


def _links(_: Deployment, __: int, by: float) -> object:
    return {"link_ms": LINK_MS + (by + abs(by)) / 2 * 100}


def _prefixes(_: Deployment, __: int, by: float) -> object:
    return {"prefix": round(PREFIX * 2**by)}


CURVES = (
    Curve("fig3-users", "equal users", "users", range(2, 33, 2), lambda v: paper(int(v))),
    Curve(
        "fig3-alpha",
        "6 equal users",
        "acceptance",
        [0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.78, 0.8, 0.85, 0.9, 0.95],
        lambda v: paper(6, v),
    ),
    Curve(
        "fig3-device",
        "14 equal users",
        "ms a drafted token",
        [3.7, 7.5, 15, 25, 33.9, 50, 75, 100, 150],
        lambda v: paper(14, token_ms=v),
    ),
    Curve(
        "fig3-uplink",
        "6 equal users",
        "link ms a round",
        [0, 3, 10, 25, 50, 100, 200],
        lambda v: paper(6, link_ms=v),
    ),
    Curve(
        "fig4-alpha",
        "12 users, acceptance .78 +- x",
        "spread of acceptance",
        [0, 0.05, 0.1, 0.15, 0.2],
        lambda v: _spread(_alphas, v),
    ),
    Curve(
        "fig4-device",
        "12 users, device time x 2^(-x..x)",
        "spread of device time (octaves)",
        [0, 0.5, 1, 1.5, 2],
        lambda v: _spread(_devices, v),
    ),
    Curve(
        "fig4-uplink",
        "12 users, half of them with up to 100 x ms more on the link",
        "spread of link time",
        [0, 0.25, 0.5, 1, 2],
        lambda v: _spread(_links, v),
    ),
    Curve(
        "fig4-prefix",
        "12 users, prefix 512 x 2^(-x..x)",
        "spread of prefix (octaves)",
        [0, 1, 2, 3],
        lambda v: _spread(_prefixes, v),
    ),
    Curve(
        "stages",
        "14 equal users, the server cut into stages (ours)",
        "verify stages",
        [1, 2, 4, 8],
        lambda v: paper(14, stages=int(v)),
    ),
)


def points(curve: Curve) -> list[Point]:
    """Every value of a sweep, planned by every method."""
    return [_point(value, Tables(curve.at(value))) for value in curve.values]


def _point(value: float, tables: Tables) -> Point:
    ours, theirs = plan_best(tables), algorithm1(tables)
    if ours is None or theirs is None:
        raise ValueError(f"nothing fits in the memory at {value:g}")
    rates: dict[str, float | None] = {
        "ours": evaluate(ours.plan, tables).throughput,
        "algorithm1": evaluate(theirs.plan, tables).throughput,
    }
    rates |= {name: baseline(tables) for name, baseline in BASELINES.items()}
    rates["greedy"] = best_greedy(tables)[1].throughput
    return Point(value, rates, len(ours.plan.batches))
