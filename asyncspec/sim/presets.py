"""Named cost models: what is known of real clusters, in units of one stage pass. Pure.

The unit is the pass of a segment that fits the plateau, so tokens a second are tokens a pass.
``scaled`` turns a preset into seconds.
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.sim.cluster_cost import ClusterCost
from asyncspec.sim.draft_cost import DraftCost
from asyncspec.sim.link_cost import LinkCost
from asyncspec.sim.stage_cost import StageCost

JETSON_ROW = 0.013

# A 7B model in fp16 on four 8 GB boards with 1 Gbit/s between them.
JETSON_7B = ClusterCost(
    stage=StageCost(plateau=16, row_seconds=JETSON_ROW),
    draft=DraftCost(level_seconds=0.2),
    verdict_seconds=0.15,
    wire=LinkCost(latency=0.03),
)

PRESETS: dict[str, ClusterCost] = {
    # The papers' own accounting: a pass is a turn whatever its rows; seven draft passes fill one.
    "turns": ClusterCost(draft=DraftCost(level_seconds=1 / 7)),
    "jetson-7b": JETSON_7B,
    # A 13B model in four bits on the same boards: passes are long, so the rest weighs less.
    "jetson-13b-int4": ClusterCost(
        stage=StageCost(plateau=16, row_seconds=JETSON_ROW),
        draft=DraftCost(level_seconds=0.065),
        verdict_seconds=0.05,
        wire=LinkCost(latency=0.01),
        width=5120,
    ),
    # Server GPUs: rows are nearly free.
    "server": ClusterCost(
        stage=StageCost(plateau=64, row_seconds=0.002),
        draft=DraftCost(level_seconds=0.15),
        verdict_seconds=0.05,
        wire=LinkCost(latency=0.02),
    ),
    # "jetson-7b" with ten times the latency.
    "slow-links": replace(JETSON_7B, wire=LinkCost(latency=0.3)),
}


def scaled(cost: ClusterCost, pass_seconds: float) -> ClusterCost:
    """The same cluster with a pass of ``pass_seconds`` and all other times in proportion."""
    ratio = pass_seconds / cost.stage.pass_seconds
    return replace(
        cost,
        stage=replace(
            cost.stage, pass_seconds=pass_seconds, row_seconds=cost.stage.row_seconds * ratio
        ),
        draft=DraftCost(cost.draft.level_seconds * ratio, cost.draft.call_seconds * ratio),
        verdict_seconds=cost.verdict_seconds * ratio,
        wire=replace(cost.wire, latency=cost.wire.latency * ratio),
    )
