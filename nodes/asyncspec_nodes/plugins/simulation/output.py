"""What ``asyncspec simulate`` prints: a table of policies side by side, or one JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncspec_nodes.cli.terminal.run import number
from asyncspec_nodes.plugins.simulation.cluster import Outcome, Setting

NOT_COMPARED = "lossy: not compared"
"""Instead of whether a text is the reference's."""


def table(setting: Setting, unit: str, outcomes: Sequence[Outcome]) -> str:
    """Markdown, aligned for a terminal; the ratio is to the first policy. Below it the ``unit`` of
    time ("stage pass" or "second"), and which policies are lossy."""
    speed = "tokens/s" if unit == "second" else "tokens/stage pass"
    base = rates(outcomes[0])["tokens_per_second"]
    cells = [_cells(outcome, speed, base) for outcome in outcomes]
    lines = [[*cells[0]], *([*row.values()] for row in cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    rows = [
        f"| {' | '.join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])} |"
        for line in lines
    ]
    time = (
        f"a second: a stage pass takes {setting.cost.stage.pass_seconds:g} s"
        if unit == "second"
        else "a stage pass; --stage-seconds S, what a pass takes on your machines, makes it a "
        "second"
    )
    lossy = [f"{outcome.policy} is {NOT_COMPARED}" for outcome in outcomes if outcome.lossy]
    return "\n".join([*rows, f"the unit of time is {time}", *lossy]) + "\n"


def _cells(outcome: Outcome, speed: str, base: float) -> dict[str, str]:
    values, stages = rates(outcome), outcome.busy[1:]
    return {
        "policy": outcome.policy,
        speed: f"{values['tokens_per_second']:.3g}",
        "ratio": f"{values['tokens_per_second'] / base:.2f}" if base else "-",
        "tokens/turn": f"{values['tokens_per_turn']:.3f}",
        "tokens/round": f"{values['tokens_per_round']:.2f}",
        "hit rate": f"{values['hit_rate']:.2f}",
        "wasted rows/token": f"{values['wasted_rows'] / values['new_tokens']:.1f}",
        "busy: draft": f"{outcome.busy[0]:.0%}",
        "stages": f"{sum(stages) / len(stages):.0%}",
        "busiest": f"{max(stages):.0%}",
    }


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
    first = min(s["first_token_seconds"] for s in outcome.stats)
    last = max(s["first_token_seconds"] + s["decode_seconds"] for s in outcome.stats)
    return sums | {
        "tokens_per_second": _ratio(decoded, last - first),
        "tokens_per_round": _ratio(decoded, sums["rounds"]),
        "tokens_per_turn": _ratio(decoded, sums["turns"]),
        "hit_rate": _ratio(hits, decoded),
    }


def as_dict(
    setting: Setting, names: Mapping[str, str], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """The JSON object; other programs read it. ``names``: the language's, the costs', and the unit
    of all times, also where a field says "seconds"."""
    return {
        "stages": setting.stages,
        "requests": setting.requests,
        "tokens": setting.tokens,
        **names,
        "cost_model": msgspec.to_builtins(setting.cost, str_keys=True),
        "policies": {
            outcome.policy: {
                "stats": _numbers(rates(outcome)),
                "requests": [_numbers(stats) for stats in outcome.stats],
                "virtual_seconds": outcome.seconds,
                # By rank: the draft node first.
                "busy": outcome.busy,
                "steps": outcome.steps,
                "lossy": outcome.lossy,
                "matches_reference": NOT_COMPARED if outcome.lossy else True,
            }
            for outcome in outcomes
        },
    }


def _numbers(stats: dict[str, float]) -> dict[str, float]:
    return {name: number(name, float(value)) for name, value in stats.items()}


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
