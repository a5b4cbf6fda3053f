"""The parts of ``bench serving``: how each is measured, shown and drawn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tools.bench.limits.progress import Tick
from tools.bench.serving import padded, page, plots, simulated, users
from tools.bench.serving.padded import Padded
from tools.bench.serving.simulated import Curve


class Part(Struct, frozen=True):
    """One of them."""

    # Raises ``AsyncSpecError``.
    measure: Callable[[Tick], Any]
    # Markdown.
    page: Callable[[Any], str]
    # Ratios that matter, by name.
    figures: Callable[[Any], dict[str, float]]
    # Write the figure, where there is one.
    draw: Callable[[Any, Path], None] | None = None


def as_dict(found: Any) -> Any:
    """What was measured, as JSON holds it."""
    return msgspec.to_builtins(found, str_keys=True)


def _simulated_figures(curves: list[Curve]) -> dict[str, float]:
    plain = {curve.costs: curve for curve in curves if curve.series == "autoregressive"}
    figures = {}
    for curve in curves:
        for load in curve.loads:
            key = f"{curve.costs}_{curve.series}_{load.running}".replace(", ", "-")
            base = plain[curve.costs].at(load.running)
            figures[f"throughput_{key}"] = load.tokens_per_second / base.tokens_per_second
            figures[f"p99_{key}"] = load.between_p99 / base.between_p99
            figures[f"answer_p99_{key}"] = load.answer_p99 / base.answer_p99
            figures[f"little_{key}"] = load.little
    return figures


def _draw_simulated(curves: list[Curve], file: Path) -> None:
    panels = {}
    for costs in dict.fromkeys(curve.costs for curve in curves):
        series = {curve.series: curve.loads for curve in curves if curve.costs == costs}
        alone = {name: series[name][0] for name in ("specpipe", "flowspec")}
        panels[costs] = (series, alone)
    plots.draw(panels, "pass", file)


def _padded_figures(found: Padded) -> dict[str, float]:
    plain = {load.running: load for load in found.shared["autoregressive"]}
    figures = {f"single_{policy}": ratio for policy, ratio in found.single.items()}
    for policy, loads in found.shared.items():
        for load in loads:
            base = plain[load.running]
            key = f"{policy}_{load.running}"
            figures[f"throughput_{key}"] = load.tokens_per_second / base.tokens_per_second
            figures[f"p99_{key}"] = load.between_p99 / base.between_p99
            figures[f"answer_p99_{key}"] = load.answer_p99 / base.answer_p99
            figures[f"little_{key}"] = load.little
    return figures


def _draw_padded(found: Padded, file: Path) -> None:
    title = f"{padded.STAGES} x {1e3 * padded.STAGE_PACE.seconds:.0f} ms"
    plots.draw({title: (found.shared, found.alone)}, "s", file)


PARTS = {
    "simulated": Part(
        simulated.measure,
        page.simulated_page,
        _simulated_figures,
        _draw_simulated,
    ),
    "padded": Part(
        lambda tick: asyncio.run(padded.measure(tick)),
        page.padded_page,
        _padded_figures,
        _draw_padded,
    ),
    "fairness": Part(
        lambda tick: asyncio.run(users.measure_fairness()),
        page.fairness_page,
        lambda found: {"least_share": found.least_share},
    ),
    "memory": Part(
        lambda tick: asyncio.run(users.measure_memory()),
        page.memory_page,
        lambda found: {f"growth_{count}": found.growth(count) for count in found.after},
    ),
}
