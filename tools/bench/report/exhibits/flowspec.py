"""FlowSpec: Tables I to III, Figures 5 and 6."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from asyncspec.core.sampling import Sampling
from asyncspec.sim.costs import ClusterCost, LinkCost
from tools.bench.report.cell import GREEDY, Setting
from tools.bench.report.costs import (
    GIGABIT,
    JETSON_7B,
    JETSON_13B,
    LAYERS_7B,
    TURNS,
    tensor_parallel,
)
from tools.bench.report.exhibit import BY_SET, Exhibit, Point
from tools.bench.tensor_parallel.cost import Kind

STAGES = 4
TEMPERATURES = {"T = 0": GREEDY, "T = 1": Sampling(temperature=1.0)}
CHUNK_PP, PIPEDEC, FLOWSPEC = "Chunk-PP", "PipeDec", "FlowSpec"
CONTEXT_ONLY = "FlowSpec, context-aware only"
POLICIES = {
    CHUNK_PP: "chunked",
    "one chunk": "chunked:pieces=1,segment=80",
    PIPEDEC: "pipedec:width=16,children=16",
    "Pruned PP": "pruned",
    "FlowSpec w/o SBD": "flowspec-no-sbd",
    FLOWSPEC: "flowspec",
    CONTEXT_ONLY: "flowspec:d_most=5",
}
"""FlowSpec ran PipeDec with 16 nodes a level (A-C). Its program, as published for evaluation, has
score-aware expansion off; a tree that may not be deeper than the first has it off here."""

TENSOR_PARALLEL: dict[str, Kind] = {"Megatron-LM": "megatron", "Galaxy": "galaxy"}
"""With the same tree as Chunk-PP, in one pass of all devices."""

TABLE_1 = (*TENSOR_PARALLEL, CHUNK_PP, "one chunk", PIPEDEC, FLOWSPEC, CONTEXT_ONLY)
TABLE_3 = (CHUNK_PP, "Pruned PP", "FlowSpec w/o SBD", FLOWSPEC, CONTEXT_ONLY)
BANDWIDTHS = (1000, 500, 250, 125)
DEPTHS = (3, 4, 5, 6, 7)


def exhibits(stages: int | None) -> Iterator[Exhibit]:
    """All of them, at so many stages, or the paper's own number."""
    n = stages or STAGES
    yield _by_set("flowspec-table1", "Table I: tokens/s, 7B", TABLE_1, n, JETSON_7B, paper=PAPER_1)
    yield _by_set(
        "flowspec-table1-13b",
        "Table I: tokens/s, 13B in four bits",
        (CHUNK_PP, PIPEDEC, FLOWSPEC),
        n,
        JETSON_13B,
        paper=PAPER_1_13B,
    )
    yield Exhibit(
        name="flowspec-table2",
        title="Table II: tokens a turn (ALT) and a round (ALR), every pass a turn",
        points=tuple(
            Point(name, Setting(policy, "eagle", n, TURNS), group=group, samplings=(sampling,))
            for group, sampling in TEMPERATURES.items()
            for name, policy in {"plain pipeline": "autoregressive", **POLICIES}.items()
        ),
        metrics=("alt", "alr", "paper_alt", "paper_alr", "accuracy", "wasted"),
        baseline=CHUNK_PP,
        paper=PAPER_2,
    )
    yield _by_set("flowspec-table3", "Table III: ablation", TABLE_3, n, JETSON_7B, paper=PAPER_3)
    yield _bandwidths(n)
    yield _depths(n)


def _by_set(
    name: str, title: str, rows: tuple[str, ...], n: int, cost: ClusterCost, *, paper: str
) -> Exhibit:
    points = tuple(
        Point(row, _setting(row, n, cost), BY_SET, group, (sampling,))
        for group, sampling in TEMPERATURES.items()
        for row in rows
    )
    return Exhibit(
        name, title, points, ("tokens_per_second",), baseline=CHUNK_PP, plot="bars", paper=paper
    )


def _setting(row: str, n: int, cost: ClusterCost) -> Setting:
    """A row's setting on ``n`` devices with a 7B model, or any where none is tensor-parallel."""
    if row in TENSOR_PARALLEL:
        cost = tensor_parallel(cost, TENSOR_PARALLEL[row], n, LAYERS_7B)
        return Setting(POLICIES["one chunk"], "eagle", 1, cost)
    return Setting(POLICIES[row], "eagle", n, cost)


def _bandwidths(n: int) -> Exhibit:
    points = tuple(
        Point(row, _setting(row, n, _wired(bandwidth)), str(bandwidth))
        for row in (*TENSOR_PARALLEL, CHUNK_PP, PIPEDEC, FLOWSPEC)
        for bandwidth in BANDWIDTHS
    )
    return Exhibit(
        name="flowspec-figure5",
        title="Figure 5: tokens/s by bandwidth",
        points=points,
        metrics=("tokens_per_second",),
        columns="Mbit/s",
        plot="lines",
        sparse=True,
        virtual=True,
        paper="From 1000 to 125 Mbit/s the pipelined methods keep over 90 %; FlowSpec is always "
        "on top, over 1.37 times Chunk-PP. Tensor parallelism falls to 40 %.",
    )


def _wired(megabits: int) -> ClusterCost:
    wire = LinkCost(JETSON_7B.wire.latency, megabits * GIGABIT / 1000)
    return replace(JETSON_7B, wire=wire)


def _depths(n: int) -> Exhibit:
    points = tuple(
        Point(str(first), Setting(_deep(first, then), "eagle", n, JETSON_7B), str(then))
        for first in DEPTHS
        for then in DEPTHS
    )
    return Exhibit(
        name="flowspec-figure6",
        title="Figure 6: tokens/s by depth of the first and the expanding trees",
        points=points,
        metrics=("tokens_per_second",),
        rows="d_init",
        columns="d_exp",
        plot="heat",
        sparse=True,
        virtual=True,
        paper="The best is d_init = d_exp = 5, where drafting fills a turn of the pipeline.",
    )


def _deep(first: int, then: int) -> str:
    return f"flowspec:d_init={first},d_exp={then}"


PAPER_1 = (
    "LLaMA2-7B, mean of six sets, T = 0: Chunk-PP 6.08 (1.00), Megatron-LM 2.02 (.34), "
    "Galaxy 2.10 (.35), PipeDec 7.03 (1.16), FlowSpec 8.70 (1.43). "
    "T = 1: 5.78 (1.00), 1.93 (.33), 2.00 (.35), 7.02 (1.21), 8.38 (1.45)."
)
PAPER_1_13B = (
    "LLaMA2-13B, mean of six sets, T = 0: Chunk-PP 1.31 (1.00), PipeDec 1.59 (1.21), "
    "FlowSpec 2.21 (1.69). T = 1: 1.26 (1.00), 1.60 (1.26), 2.14 (1.70)."
)
PAPER_2 = (
    "LLaMA2-7B, ALT / ALR in the paper's count: Chunk-PP .54 / 4.89, PipeDec .59 / 5.68, "
    "FlowSpec 1.01 / 8.67 (ratios of ALT 1.00, 1.09, 1.87)."
)
PAPER_3 = (
    "Mean of six sets, T = 0: Chunk-PP 6.08 (1.00), Pruned PP 7.66 (1.25), FlowSpec w/o SBD 8.43 "
    "(1.38), FlowSpec 8.70 (1.43). T = 1: 5.78 (1.00), 7.34 (1.26), 7.99 (1.38), 8.38 (1.45)."
)
