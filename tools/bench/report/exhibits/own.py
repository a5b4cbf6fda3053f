"""Comparisons no paper has: token sources side by side, under the policies that use them most; and
`flow` beside the papers' systems, on each paper's machines."""

from __future__ import annotations

from collections.abc import Iterator

from asyncspec_nodes.cluster.checkpoints import NONE
from tools.bench.report.cell import Setting
from tools.bench.report.costs import JETSON_7B, JETSON_13B, TURNS, asked, server
from tools.bench.report.exhibit import BY_SET, Exhibit, Point
from tools.bench.report.exhibits.flowspec import CHUNK_PP, FLOWSPEC, PIPEDEC, STAGES, TEMPERATURES
from tools.bench.report.exhibits.pipedec import STAGES as PIPEDEC_STAGES
from tools.bench.report.exhibits.specpipe import PP, SPECINFER, SPECPIPE
from tools.bench.report.exhibits.specpipe import STAGES as SPECPIPE_STAGES
from tools.bench.report.models import SOURCES as MODELS

SOURCE_TABLE = "source-table"
SOURCES = ("draft", "eagle", "ngram", "hybrid", "eagle+ngram")
POLICIES = ("chunked", "pruned", "specpipe", "flowspec")
SAMPLED = ("pruned", "flowspec")
SYSTEMS = {
    PP: "autoregressive",
    CHUNK_PP: "chunked",
    SPECINFER: "static-tree",
    PIPEDEC: "pipedec",
    SPECPIPE: "specpipe",
    FLOWSPEC: "flowspec",
    "flow": "flow",
}


def exhibits(stages: int | None) -> Iterator[Exhibit]:
    """All of them, at so many stages, or four; systems at each paper's own number."""
    n = stages or STAGES
    points = tuple(
        Point(source, _setting(policy, source, n), BY_SET, f"{policy}, {group}", (sampling,))
        for group, sampling in TEMPERATURES.items()
        for policy in (POLICIES if sampling.greedy else SAMPLED)
        for source in SOURCES
    )
    yield Exhibit(
        name="sources",
        title="Token sources: tokens a turn",
        points=points,
        metrics=("alt",),
        rows="source",
        plot="bars",
    )
    yield Exhibit(
        name=SOURCE_TABLE,
        title="Every token source, flowspec, T = 0",
        points=tuple(Point(one, _setting("flowspec", one, n)) for one in MODELS if one != NONE),
        metrics=("alt", "alr", "accuracy"),
        rows="source",
    )
    yield _systems(stages)


def _systems(stages: int | None) -> Exhibit:
    """The papers' machines, each with the token source that its paper has; one also with a head."""
    flowspec, specpipe, pipedec = (stages or n for n in (STAGES, SPECPIPE_STAGES, PIPEDEC_STAGES))
    machines = {
        "FlowSpec's boards, 7B": ("eagle", flowspec, JETSON_7B),
        "FlowSpec's boards, 13B": ("eagle", flowspec, JETSON_13B),
        "SpecPipe's server": ("draft", specpipe, server(specpipe)),
        "SpecPipe's server, EAGLE": ("eagle", specpipe, server(specpipe)),
        "SpecPipe's servers": ("draft", specpipe, server(specpipe, slow_link=True)),
        "PipeDec's server": ("draft", pipedec, server(pipedec)),
    }
    points = tuple(
        Point(system, Setting(policy, source, n, cost), machine, group, (sampling,))
        for group, sampling in TEMPERATURES.items()
        for system, policy in SYSTEMS.items()
        for machine, (source, n, cost) in machines.items()
    )
    return Exhibit(
        name="systems",
        title="Tokens/s on the papers' machines",
        points=points,
        metrics=("tokens_per_second",),
        baseline=PP,
        virtual=True,
    )


def _setting(policy: str, source: str, n: int) -> Setting:
    return Setting(policy, source, n, asked(TURNS, source))
