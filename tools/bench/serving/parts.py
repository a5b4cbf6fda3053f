"""The parts of ``bench serving``: how each is measured, shown and drawn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tools.bench.limits.progress import Tick
from tools.bench.serving import beside_vllm, padded, page, plots, simulated, users
from tools.bench.serving.beside_vllm import Beside
from tools.bench.serving.load import Load
from tools.bench.serving.padded import Padded
from tools.bench.serving.simulated import Curve


class Part(Struct, frozen=True):
    """One of them."""

    # By a bar's tick and the interpreter that has vLLM. Raises ``AsyncSpecError``.
    measure: Callable[[Tick, Path | None], Any]
    # Markdown.
    page: Callable[[Any], str]
    # Ratios that matter, by name.
    figures: Callable[[Any], dict[str, float]]
    # Write the figure, where there is one.
    draw: Callable[[Any, Path], None] | None = None


_PADDED_TITLE = f"{padded.STAGES} x {1e3 * padded.STAGE_PACE.seconds:.0f} ms"


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
    figures = {f"single_{policy}": ratio for policy, ratio in found.single.items()}
    return figures | _ratios(found.shared, "autoregressive")


def _ratios(series: Mapping[str, Sequence[Load]], base_name: str) -> dict[str, float]:
    """What each gives at so many requests at a time over what the base gives there."""
    bases = {load.running: load for load in series[base_name]}
    figures = {}
    for policy, loads in series.items():
        for load in loads:
            base = bases[load.running]
            key = f"{policy}_{load.running}"
            figures[f"throughput_{key}"] = load.tokens_per_second / base.tokens_per_second
            figures[f"p99_{key}"] = load.between_p99 / base.between_p99
            figures[f"answer_p99_{key}"] = load.answer_p99 / base.answer_p99
            figures[f"little_{key}"] = load.little
    return figures


def _draw_padded(found: Padded, file: Path) -> None:
    plots.draw({_PADDED_TITLE: (found.shared, found.alone)}, "s", file)


def _measure_beside_vllm(tick: Tick, python: Path | None) -> Beside:
    assert python is not None, "the command asks for it"
    return asyncio.run(beside_vllm.measure(python, tick))


def _draw_beside_vllm(found: Beside, file: Path) -> None:
    plots.draw({_PADDED_TITLE: (found.loads, {})}, "s", file)


PARTS = {
    "simulated": Part(
        lambda tick, python: simulated.measure(tick),
        page.simulated_page,
        _simulated_figures,
        _draw_simulated,
    ),
    "padded": Part(
        lambda tick, python: asyncio.run(padded.measure(tick)),
        page.padded_page,
        _padded_figures,
        _draw_padded,
    ),
    "vllm": Part(
        _measure_beside_vllm,
        page.beside_vllm_page,
        lambda found: _ratios(found.loads, beside_vllm.VLLM),
        _draw_beside_vllm,
    ),
    "fairness": Part(
        lambda tick, python: asyncio.run(users.measure_fairness()),
        page.fairness_page,
        lambda found: {"least_share": found.least_share},
    ),
    "memory": Part(
        lambda tick, python: asyncio.run(users.measure_memory()),
        page.memory_page,
        lambda found: {f"growth_{count}": found.growth(count) for count in found.after},
    ),
}
