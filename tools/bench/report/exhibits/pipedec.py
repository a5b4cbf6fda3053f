"""PipeDec: Figures 4 to 7 and the number of stages (4.3)."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from tools.bench.report.cell import Setting
from tools.bench.report.costs import server
from tools.bench.report.exhibit import BY_SET, Exhibit, Point
from tools.bench.report.exhibits.specpipe import PP, by_set, grid, stochastic

STAGES = 14
STAGE_COUNTS = (7, 14, 21)
STPP, PIPEDEC = "STPP", "PipeDec"
METHODS = {
    PP: ("autoregressive", "none"),
    STPP: ("static-tree", "draft"),
    PIPEDEC: ("pipedec", "draft"),
}


def exhibits(stages: int | None) -> Iterator[Exhibit]:
    """All of them, at so many stages, or the paper's own number."""
    n = stages or STAGES
    yield grid("pipedec-figure4", "Figure 4: width and children of a tree", n, PAPER_4)
    figure_5 = by_set("pipedec-figure5", "Figure 5: latency a token", METHODS, n, server(n))
    yield replace(figure_5, paper=PAPER_5)
    yield _accuracy()
    yield _stage_counts()
    methods = {row: METHODS[row] for row in (STPP, PIPEDEC)}
    yield stochastic("pipedec-figure7", "Figure 7: stochastic decoding", methods, n, PAPER_7)


def _accuracy() -> Exhibit:
    static = Point(STPP, _setting(METHODS[STPP], STAGES), BY_SET)
    dynamic = (
        Point(f"{PIPEDEC}, {n} stages", _setting(METHODS[PIPEDEC], n), BY_SET) for n in STAGE_COUNTS
    )
    return Exhibit(
        name="pipedec-figure6",
        title="Figure 6: prediction accuracy",
        points=(static, *dynamic),
        metrics=("accuracy",),
        plot="bars",
        paper="PipeDec's accuracy is well above the static tree's, also where the tree is deep.",
        sparse=True,
        virtual=True,
    )


def _stage_counts() -> Exhibit:
    points = tuple(
        Point(row, _setting(METHODS[row], n), str(n)) for row in METHODS for n in STAGE_COUNTS
    )
    return Exhibit(
        name="pipedec-stages",
        title="4.3.2: the same model in more stages",
        points=points,
        metrics=("tbt", "alt"),
        columns="stages",
        plot="lines",
        paper="14 stages are 1.64 times as fast as 7; then the gain ends.",
        sparse=True,
        virtual=True,
    )


def _setting(method: tuple[str, str], n: int) -> Setting:
    return Setting(*method, n, server(n))


PAPER_4 = (
    "Accuracy grows with the width; latency falls and rises again. More children help, ever less. "
    "Width 32 with 16 children is chosen."
)
PAPER_5 = (
    "With 14 stages PipeDec takes 4.46 to 7.79 times less than PP, 2.2 to 2.69 less than STPP."
)
PAPER_7 = "Latency grows little and accuracy falls little; PipeDec less than STPP."
