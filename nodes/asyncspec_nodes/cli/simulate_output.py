"""What ``asyncspec simulate`` prints: a table of policies side by side, or one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from asyncspec_nodes.cli.run_output import number
from asyncspec_nodes.cli.simulate_options import SimulateOptions, Unit
from asyncspec_nodes.simulation.cluster import Outcome

SPEEDS: dict[Unit, str] = {"stage pass": "tokens/stage pass", "second": "tokens/s"}
COLUMNS = (
    "policy",
    SPEEDS["second"],
    "ratio",
    "tokens/turn",
    "tokens/round",
    "hit rate",
    "wasted rows/token",
    "busy: draft",
    "stages",
    "busiest",
)


NOT_COMPARED = "lossy: not compared"
"""Instead of whether a text is the reference's."""


def table(options: SimulateOptions, outcomes: Sequence[Outcome]) -> str:
    """Markdown, aligned for a terminal; the ratio is to the first policy. Below it, the unit of
    time, and which policies are lossy."""
    columns = (COLUMNS[0], SPEEDS[options.unit], *COLUMNS[2:])
    base = rates(outcomes[0])["tokens_per_second"]
    lines = [_cells(outcome, base) for outcome in outcomes]
    widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)]
    rule = ["-" * widths[0], *["-" * (width - 1) + ":" for width in widths[1:]]]
    rows = [_row(cells, widths) for cells in (columns, rule, *lines)]
    notes = [f"{outcome.policy} is {NOT_COMPARED}" for outcome in outcomes if outcome.lossy]
    return "\n".join([*rows, _unit(options), *notes]) + "\n"


def _unit(options: SimulateOptions) -> str:
    if options.unit == "second":
        seconds = options.setting.cost.stage.pass_seconds
        return f"the unit of time is a second: a stage pass takes {seconds:g} s"
    return (
        "the unit of time is a stage pass; --stage-seconds S, what a pass takes on your machines, "
        "makes it a second"
    )


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    return f"| {' | '.join((first, *rest))} |"


def _cells(outcome: Outcome, base: float) -> list[str]:
    values, stages = rates(outcome), outcome.busy[1:]
    speed = values["tokens_per_second"]
    return [
        outcome.policy,
        f"{speed:.3g}",
        f"{speed / base:.2f}" if base else "-",
        f"{values['tokens_per_turn']:.3f}",
        f"{values['tokens_per_round']:.2f}",
        f"{values['hit_rate']:.2f}",
        f"{values['wasted_rows'] / values['new_tokens']:.1f}",
        f"{outcome.busy[0]:.0%}",
        f"{sum(stages) / len(stages):.0%}",
        f"{max(stages):.0%}",
    ]


def rates(outcome: Outcome) -> dict[str, float]:
    """docs/reference/metrics.md over all requests: sums, and the ratios made of them.

    ``tokens_per_second`` is what the cluster gives: tokens after the first of each request, by the
    time from the first of all to the last (for one request the same as its own).
    """
    sums: dict[str, float] = {}
    for stats in outcome.stats:
        for name, value in stats.items():
            sums[name] = sums.get(name, 0) + value
    decoded = sums["new_tokens"] - len(outcome.stats)
    hits = sum(s["hit_rate"] * max(0, s["new_tokens"] - 1) for s in outcome.stats)
    begun = min(s["first_token_seconds"] for s in outcome.stats)
    ended = max(s["first_token_seconds"] + s["decode_seconds"] for s in outcome.stats)
    return sums | {
        "tokens_per_second": _ratio(decoded, ended - begun),
        "tokens_per_round": _ratio(decoded, sums["rounds"]),
        "tokens_per_turn": _ratio(decoded, sums["turns"]),
        "hit_rate": _ratio(hits, decoded),
    }


def as_dict(options: SimulateOptions, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The JSON object; other programs read it."""
    setting = options.setting
    return {
        "stages": setting.stages,
        "requests": setting.requests,
        "tokens": setting.tokens,
        "language": options.language,
        "costs": options.costs,
        # Of all times, also where a name says "seconds".
        "unit": options.unit,
        "cost_model": msgspec.to_builtins(setting.cost, str_keys=True),
        "policies": {outcome.policy: _outcome(outcome) for outcome in outcomes},
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "stats": _numbers(rates(outcome)),
        "requests": [_numbers(stats) for stats in outcome.stats],
        "virtual_seconds": outcome.seconds,
        # By rank: the draft node first.
        "busy": outcome.busy,
        "steps": outcome.steps,
        "lossy": outcome.lossy,
        "matches_reference": NOT_COMPARED if outcome.lossy else True,
    }


def _numbers(stats: dict[str, float]) -> dict[str, float]:
    return {name: number(name, float(value)) for name, value in stats.items()}


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
