"""Cost models of the papers' test beds, as far as their figures tell (seconds of virtual time)."""

from __future__ import annotations

import math

from msgspec.structs import replace

from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.sim.costs import PRESETS, ClusterCost, LinkCost, scaled
from asyncspec_nodes.cluster.checkpoints import NGRAM, SUFFIX
from tools.bench.report.models import SUFFIX_EARLIER
from tools.bench.tensor_parallel.cost import Kind, Link, Model, pass_seconds

TURNS = PRESETS["turns"]
"""Every pass a turn: the papers' own accounting."""

GIGABIT = 125e6
"""Bytes a second."""

FLOAT16_BYTES = 2

JETSON_7B = replace(
    scaled(PRESETS["jetson-7b"], 0.09),
    wire=LinkCost(latency=0.001, bandwidth=GIGABIT),
)
"""FlowSpec's boards with a 7B model: 6.08 tokens/s at .54 a turn make some .09 s a turn (Tables I
and II)."""

JETSON_13B = replace(
    scaled(PRESETS["jetson-13b-int4"], 0.41),
    wire=LinkCost(latency=0.001, bandwidth=GIGABIT),
)
"""The same with a 13B model in four bits: 1.31 tokens/s at .55 a turn."""

WHOLE_PASS = 0.302
"""One token through all stages of SpecPipe's server: the TBT of its plain pipeline (4.2)."""

DRAFT_PASS = 0.006
"""One pass of a 1B draft model on a GPU that a seventh or so of a stage's weights would fill."""

PLATEAU = 64
ROW_SHARE = 0.002
"""Rows that cost no more than one, and the share of a pass that each row more costs: server GPUs
(SpecPipe Fig. 9 has the step there)."""


def server(stages: int, *, slow_link: bool = False) -> ClusterCost:
    """A 70B model on server GPUs, cut in so many equal stages; all hops in one server, or with
    10 Gbit/s and a millisecond (SpecPipe 4.2) instead."""
    stage = WHOLE_PASS / stages
    wire = LinkCost(latency=0.001, bandwidth=10 * GIGABIT) if slow_link else LinkCost(0.0001)
    return ClusterCost(
        stage=StageCost(stage, PLATEAU, ROW_SHARE * stage),
        draft=DraftCost(DRAFT_PASS),
        verdict_seconds=0.002,
        wire=wire,
        width=8192,
    )


LAYERS_7B = 32


def tensor_parallel(cost: ClusterCost, kind: Kind, devices: int, layers: int) -> ClusterCost:
    """The devices of a pipeline's ``devices`` stages as one stage in tensor parallelism: a pass of
    the whole model takes as long as a stage's did, and an exchange that grows with its rows."""
    model = Model(layers, FLOAT16_BYTES * cost.width, devices)
    link = Link(cost.wire.latency, cost.wire.bandwidth or math.inf)

    def exchange(rows: int) -> float:
        compute = cost.stage.seconds(rows)
        return pass_seconds(kind, model, rows, compute, link) - compute

    few, many = devices, cost.stage.plateau + devices
    row = (exchange(many) - exchange(few)) / (many - few)
    return replace(cost, exchange=StageCost(exchange(few) - few * row, 0, row))


SLOW_DRAFT = ClusterCost(
    stage=StageCost(0.04, PLATEAU),
    draft=DraftCost(0.010, 0.007, plateau=8, row_seconds=0.0003),
    verdict_seconds=0.003,
    wire=LinkCost(0.0005),
)
"""Stages of 40 ms, and a small EAGLE head on slow cores with other work (docs/notebook.md): levels,
what a call takes besides, rows, and a verdict."""

LOOKUPS = {NGRAM, SUFFIX, SUFFIX_EARLIER}


def asked(cost: ClusterCost, source: str) -> ClusterCost:
    """The same cluster with this token source: a lookup takes no time, and heads and draft models
    are priced alike."""
    return replace(cost, draft=DraftCost(0.0)) if set(source.split("+")) <= LOOKUPS else cost
