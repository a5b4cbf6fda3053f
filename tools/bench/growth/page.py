"""The curves as a short page of Markdown, and as one object of JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.bench.growth.curve import Curve

Parts = Mapping[str, Sequence[Curve]]


def page(parts: Parts, *, figures: bool) -> str:
    """A table for each part, below it its figure where there is one."""
    return "\n".join(_part(name, curves, figures=figures) for name, curves in parts.items())


def _part(name: str, curves: Sequence[Curve], *, figures: bool) -> str:
    """One table for each set of sizes."""
    blocks = [f"## {name}\n"]
    for sizes in dict.fromkeys(curve.sizes for curve in curves):
        same = [curve for curve in curves if curve.sizes == sizes]
        blocks.append(_table(same))
    if figures:
        blocks.append(f"![cost by {curves[0].across}]({figure(name)})\n")
    return "\n".join(blocks)


def figure(part: str) -> str:
    """The name of a part's figure."""
    return f"growth-{part}.png"


def _table(curves: Sequence[Curve]) -> str:
    first = curves[0]
    head = [first.across, "unit", *(f"{size:,}" for size in first.sizes), "exponent", "at the end"]
    lines = [head, ["---"] * 2 + ["---:"] * (len(head) - 2)]
    for curve in curves:
        exponents = [f"{curve.exponent:+.2f}", f"{curve.last_exponent:+.2f}"]
        lines.append([curve.name, curve.unit, *map(_shown, curve.costs), *exponents])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shown(cost: float) -> str:
    return f"{cost:.2f}" if cost < 100 else f"{cost:,.0f}"


def figures_of(parts: Parts) -> dict[str, object]:
    """Exponents by curve, and the curves: sizes, costs, and costs per row and live node."""
    found: dict[str, object] = {}
    series: dict[str, object] = {}
    for part, curves in parts.items():
        for curve in curves:
            key = f"{part}_{_plain(curve.name)}"
            found[f"growth_exponent_{key}"] = curve.exponent
            found[f"growth_last_exponent_{key}"] = curve.last_exponent
            series[key] = {
                "across": curve.across,
                "unit": curve.unit,
                "sizes": curve.sizes,
                "costs": curve.costs,
            } | ({"per_row_and_node": curve.per_work} if curve.rows else {})
    return found | {"curves": series}


def _plain(name: str) -> str:
    letters = "".join(c if c.isalnum() else " " for c in name)
    return "_".join(letters.split())
