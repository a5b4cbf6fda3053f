"""The numbers a report shows, each with its definition.

Sums over requests first, ratios then, as in the papers: a long answer weighs more than a short
one. ``quartiles`` are over the single requests.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from msgspec import Struct

from tools.bench.report.cell import Stats

EXCLUDES_DRAFTING = ("pruned", "flowspec", "flowspec-no-sbd")
"""Policies whose drafting turn the FlowSpec program does not count; Chunk-PP's is counted there."""


class Run(Struct, frozen=True):
    """A request under a policy, and what came of it."""

    policy: str
    stats: Stats


Runs = Sequence[Run]


class Metric(Struct, frozen=True):
    """A number of some runs."""

    title: str
    definition: str
    of: Callable[[Runs], float]
    digits: int = 2


def total(runs: Runs, name: str) -> float:
    """A counter's sum."""
    return sum(run.stats[name] for run in runs)


def ratio(upper: float, lower: float) -> float:
    """Their quotient; not a number where there is none."""
    return upper / lower if lower else float("nan")


def decoded(runs: Runs) -> float:
    """Tokens after the first."""
    return sum(run.stats["new_tokens"] - 1 for run in runs)


def _paper_turns(runs: Runs) -> float:
    return sum(
        run.stats["turns"]
        - (run.stats["rounds"] if run.policy.partition(":")[0] in EXCLUDES_DRAFTING else 0)
        for run in runs
    )


METRICS: dict[str, Metric] = {
    "tokens_per_second": Metric(
        "tokens/s",
        "tokens after the first, by the time from the first token to the last",
        lambda runs: ratio(decoded(runs), total(runs, "decode_seconds")),
    ),
    "tbt": Metric(
        "TBT, ms",
        "time between tokens: the reciprocal of tokens/s, in milliseconds",
        lambda runs: 1000 * ratio(total(runs, "decode_seconds"), decoded(runs)),
        digits=1,
    ),
    "alt": Metric(
        "ALT",
        "tokens after the first, by pipeline turns, drafting turns included for every policy",
        lambda runs: ratio(decoded(runs), total(runs, "turns")),
        digits=3,
    ),
    "alr": Metric(
        "ALR",
        "tokens after the first, by rounds (starts of a tree)",
        lambda runs: ratio(decoded(runs), total(runs, "rounds")),
    ),
    "paper_alt": Metric(
        "ALT, paper's count",
        "as the FlowSpec program counts: drafting turns are turns of Chunk-PP, and of no other",
        lambda runs: ratio(total(runs, "new_tokens"), _paper_turns(runs)),
        digits=3,
    ),
    "paper_alr": Metric(
        "ALR, paper's count",
        "as the FlowSpec program counts: tokens by the index, from 0, of the last round",
        lambda runs: ratio(total(runs, "new_tokens"), total(runs, "rounds") - len(runs)),
    ),
    "accuracy": Metric(
        "accuracy",
        "share of the tokens after the first that were in the tree when the target chose them",
        lambda runs: ratio(total(runs, "hits"), total(runs, "hits") + total(runs, "misses")),
        digits=3,
    ),
    "wasted": Metric(
        "wasted rows a token",
        "rows computed beyond those a run without speculation computes, over all stages, a token",
        lambda runs: ratio(total(runs, "wasted_rows"), decoded(runs)),
        digits=0,
    ),
    "bytes": Metric(
        "kB a token",
        "bytes written on all links between nodes, a token, in thousands",
        lambda runs: ratio(total(runs, "bytes_sent"), 1000 * decoded(runs)),
        digits=0,
    ),
}


def quartiles(metric: Metric, runs: Runs) -> tuple[float, float, float] | None:
    """Over single requests; None where they are too few, or one has no such number."""
    values = [metric.of([run]) for run in runs if run.stats["new_tokens"] > 1]
    if len(values) < 4 or any(value != value for value in values):
        return None
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high
