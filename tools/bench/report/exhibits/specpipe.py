"""SpecPipe: Figures 10, 11, 13, 14 and 15. Sources as there: an independent draft model."""

from __future__ import annotations

from collections.abc import Iterator

from asyncspec.core.sampling import Sampling
from asyncspec.sim.costs import ClusterCost
from tools.bench.report.cell import GREEDY, Setting
from tools.bench.report.costs import server
from tools.bench.report.exhibit import ALL, BY_SET, Exhibit, Point

STAGES = 8
PP, EAGLE, SPECINFER, SPECPIPE = "PP", "EAGLE over PP", "SpecInfer", "SpecPipe"
METHODS = {
    PP: ("autoregressive", "none"),
    # One synchronous tree in one segment, of the size EAGLE's own scripts use.
    EAGLE: ("chunked:size=60,pieces=1,segment=60", "eagle"),
    SPECINFER: ("static-tree", "draft"),
    SPECPIPE: ("specpipe", "draft"),
}
WIDTHS = (8, 16, 32, 64, 128)
CHILDREN = (2, 4, 8, 16)
SHAPES = ("1x1x1x1", "1x1x3x1x1x1x1x1", "2x2x1x1x1x1", "3x2x1x1x1x1", "3x3x2x1x1", "4x3x2x2")
STOCHASTIC = tuple(Sampling(temperature=0.6, top_p=0.9, top_k=80, seed=seed) for seed in range(5))


def exhibits(stages: int | None) -> Iterator[Exhibit]:
    """All of them, at so many stages, or the paper's own number."""
    n = stages or STAGES
    yield grid("specpipe-figure10", "Figure 10: width and children of a tree", n, PAPER_10)
    yield by_set("specpipe-figure11", "Figure 11: time between tokens", METHODS, n, server(n))
    yield by_set(
        "specpipe-figure13",
        "Figure 13: time between tokens with 10 Gbit/s and a millisecond between stages",
        METHODS,
        n,
        server(n, slow_link=True),
    )
    yield _trees(n)
    methods = {row: METHODS[row] for row in (SPECINFER, SPECPIPE)}
    yield stochastic("specpipe-figure15", "Figure 15: stochastic decoding", methods, n, PAPER_15)


def grid(name: str, title: str, n: int, paper: str) -> Exhibit:
    """Accuracy and latency over width and children."""
    points = tuple(
        Point(str(width), _tree(f"specpipe:width={width},children={children}", n), str(children))
        for width in WIDTHS
        for children in CHILDREN
    )
    return Exhibit(
        name,
        title,
        points,
        ("accuracy", "tbt"),
        rows="width",
        columns="children",
        plot="heat",
        paper=paper,
        sparse=True,
        virtual=True,
    )


def by_set(
    name: str, title: str, methods: dict[str, tuple[str, str]], n: int, cost: ClusterCost
) -> Exhibit:
    """Latency of methods on every prompt set."""
    points = tuple(
        Point(row, Setting(policy, source, n, cost), BY_SET)
        for row, (policy, source) in methods.items()
    )
    paper = {"specpipe-figure11": PAPER_11, "specpipe-figure13": PAPER_13}.get(name, "")
    return Exhibit(name, title, points, ("tbt",), baseline=PP, plot="bars", paper=paper)


def stochastic(
    name: str, title: str, methods: dict[str, tuple[str, str]], n: int, paper: str
) -> Exhibit:
    """Greedy against five seeds at temperature .6, top-p .9, top-k 80."""
    points = tuple(
        Point(row, Setting(policy, source, n, server(n)), column, samplings=samplings)
        for row, (policy, source) in methods.items()
        for column, samplings in (("greedy", (GREEDY,)), ("stochastic", STOCHASTIC))
    )
    return Exhibit(
        name,
        title,
        points,
        ("tbt", "accuracy"),
        columns="decoding",
        plot="bars",
        paper=paper,
        sparse=True,
    )


def _trees(n: int) -> Exhibit:
    static = (
        Point(f"static {shape}", _tree(f"static-tree:branching={shape}", n), ALL, "static")
        for shape in SHAPES
    )
    dynamic = (
        Point(f"dynamic, width {w}", _tree(f"specpipe:width={w},children=8", n), ALL, "dynamic")
        for w in WIDTHS
    )
    return Exhibit(
        name="specpipe-figure14",
        title="Figure 14: dynamic and static trees",
        points=(*static, *dynamic),
        metrics=("accuracy", "tbt"),
        rows="tree",
        plot="scatter",
        paper="SpecPipe is more accurate, and at equal accuracy it is faster.",
        sparse=True,
        virtual=True,
    )


def _tree(policy: str, n: int) -> Setting:
    return Setting(policy, "draft", n, server(n))


PAPER_10 = (
    "Accuracy grows with the width and saturates; latency has a minimum (64 is chosen). Two "
    "children are far too few, eight are enough."
)
PAPER_11 = (
    "HumanEval-X: PP 302 ms, EAGLE-3 272 ms, SpecInfer 118 ms, SpecPipe 55 ms. Over the six sets "
    "SpecPipe is 4.19 to 5.53 times as fast as PP, 3.58 to 4.98 EAGLE-3, 2.09 to 2.38 SpecInfer."
)
PAPER_13 = "SpecPipe is 3.89 to 5.23 times as fast as PP, and 2.08 to 2.37 times as SpecInfer."
PAPER_15 = "Latency grows by 2.54 % (SpecInfer) and 4.39 % (SpecPipe)."
