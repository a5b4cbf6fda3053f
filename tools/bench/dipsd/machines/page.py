"""What plans bring on the machines, as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.bench.dipsd.machines.measure import Compared

DPI = 100


def page(found: Sequence[Compared]) -> str:
    """A table, one line a crowd."""
    lines = [
        "| users | stages | case | drafts | greedy batching (length) | dip-sd | over greedy "
        "| forecast | time with a plan |",
        "| ---: | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        forecast = one.planned.forecast
        reported = "-" if forecast is None else f"{forecast:.1f}"
        lines.append(
            f"| {one.users} | {one.stages} | {one.case} | {one.variant} "
            f"| {one.best_greedy:.1f} ({one.length}) | {one.planned.tokens_per_second:.1f} "
            f"| {one.ratio:.3f} | {reported} | {one.planned.planned:.0%} |"
        )
    return "\n".join(lines) + "\n"


def draw(found: Sequence[Compared], file: Path) -> None:
    """A plan over greedy batching, by case: a panel for each number of users and stages."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((one.users, one.stages) for one in found))
    variants = list(dict.fromkeys(one.variant for one in found))
    cases = list(dict.fromkeys(one.case for one in found))
    figure = Figure(figsize=(4.6 * len(panels), 3.4), dpi=DPI, layout="constrained")
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for number, variant in enumerate(variants):
            rows = [one for one in found if (one.users, one.stages) == panel]
            rows = [one for one in rows if one.variant == variant]
            places = [cases.index(one.case) + number / (len(variants) + 1) for one in rows]
            axis.bar(places, [one.ratio for one in rows], 1 / (len(variants) + 1), label=variant)
        axis.axhline(1.0, ls=":", color="black")
        axis.set_xticks(range(len(cases)), cases, fontsize=7, rotation=40)
        axis.set_title(f"{panel[0]} users, stages: {panel[1]}; over greedy batching", fontsize=8)
        axis.legend(fontsize=6)
    figure.savefig(file, pil_kwargs={"optimize": True})
