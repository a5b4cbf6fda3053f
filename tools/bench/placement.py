"""How well ``asyncspec plan layers`` predicts: uneven machines, placed, and then measured.

Stages of the bundled target are padded to what their machines would take: as many milliseconds as
their layers, the head among them, need there. Links are this machine's. The draft's acceptance is
fitted on the first case, whose prediction with speculation therefore says nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.base import StageOptions
from asyncspec.placement.model import Constraints, Device, Network, Placement, TargetCost
from asyncspec.placement.rate import PassShape, throughput_rate
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from asyncspec_nodes.cluster.config import Config, DraftTable, PaceTable, TargetTable
from asyncspec_nodes.cluster.placement import best_placement, target_cost
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from asyncspec_nodes.plugins.simulation.prediction import DraftModel, Prediction, predict
from tools.bench.limits.requests import speed, turn_about
from tools.bench.options import print_rows

LEVEL_SECONDS = 0.004
PLATEAU = 16
ROW_SHARE = 0.01
TOKENS = {"autoregressive": 24, "flow": 64}
CASES = {
    "three alike": (8.0, 8.0, 8.0),
    "one of half the speed": (8.0, 16.0, 8.0),
    "one of a quarter": (6.0, 6.0, 24.0),
    "all different": (4.0, 8.0, 16.0),
    "four, two slow": (6.0, 18.0, 6.0, 18.0),
}
"""Milliseconds that a mean layer takes on each machine."""


class Row(Struct, frozen=True):
    """A case."""

    case: str
    layers: str
    prediction: Prediction
    measured: Prediction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Raises ``AsyncSpecError``, also where texts differ."""
    target = target_cost(str(BUNDLED_TARGET), StageOptions(), 2048)
    # What is padded takes nothing besides.
    target = replace(target, layer_seconds=0.0, pass_seconds=0.0)
    rows: list[Row] = []
    top = 0.0
    for case, speeds in CASES.items():
        placement = placed(target, speeds)
        measured = asyncio.run(measure(placement))
        top = top or fitted(placement, measured.policy, target.row_bytes)
        layers = ", ".join(
            f"{1 + int(stage.device.name)}: {stage.layers[1] - stage.layers[0]}"
            for stage in placement.stages
        )
        rows.append(Row(case, layers, predicted(placement, top, target.row_bytes), measured))
        sys.stderr.write(f"{case}: {rows[-1]}\n")
    print_rows(options, [as_dict(row) for row in rows])
    return 0


def placed(target: TargetCost, speeds: tuple[float, ...]) -> Placement:
    """The best placement, with every machine in use."""
    mean = target.work((0, len(target.layers))) / len(target.layers)
    devices = [Device(str(i), 1 << 40, mean / (took / 1000)) for i, took in enumerate(speeds)]
    rate = throughput_rate(16)
    return best_placement(target, devices, Network(), rate, Constraints(len(speeds)))


async def measure(placement: Placement) -> Prediction:
    """Tokens a second with and without speculation, prompts left out."""
    async with LocalCluster(padded(placement), lambda report: None) as cluster:
        replies = (await turn_about({"": cluster}, TOKENS, lambda: None))[""]
    found = {policy: speed(some).tokens_per_second for policy, some in replies.items()}
    return Prediction(found["autoregressive"], found["flow"])


def padded(placement: Placement) -> Config:
    """The cluster file of a placement on emulated machines."""
    stages = placement.stages
    config = local_config(
        TargetTable(path=str(BUNDLED_TARGET)),
        DraftTable(source=str(BUNDLED_DRAFT)),
        len(stages),
        1,
        draft_pace=PaceTable(level_seconds=LEVEL_SECONDS),
    )
    layers = {rank: stage.layers for rank, stage in enumerate(stages, start=1)}
    paces = {
        rank: PaceTable(
            seconds=stage.seconds, plateau=PLATEAU, row_seconds=ROW_SHARE * stage.seconds
        )
        for rank, stage in enumerate(stages, start=1)
    }
    nodes = tuple(replace(node, layers=layers.get(node.rank)) for node in config.node)
    return replace(config, node=nodes, pace=config.pace | paces)


def predicted(placement: Placement, top: float, row_bytes: int) -> Prediction:
    """By the simulator, for a draft that is right at first in ``top`` of all cases."""
    draft = DraftModel(top, 1.0, LEVEL_SECONDS)
    return predict(placement, "flow", draft, PassShape(PLATEAU, ROW_SHARE), row_bytes)


def fitted(placement: Placement, speed: float, row_bytes: int) -> float:
    """The chance with which the prediction is the measured speed."""
    low, high = 0.05, 0.98
    for _ in range(7):
        middle = (low + high) / 2
        if predicted(placement, middle, row_bytes).policy < speed:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def as_dict(row: Row) -> dict[str, Any]:
    """A line of the table."""
    plain = row.prediction.plain / row.measured.plain - 1
    flow = row.prediction.policy / row.measured.policy - 1
    return {
        "machines": row.case,
        "layers by machine": row.layers,
        "plain, predicted": round(row.prediction.plain, 2),
        "measured": round(row.measured.plain, 2),
        "error": f"{plain:+.0%}",
        "flow, predicted": round(row.prediction.policy, 1),
        "flow, measured": round(row.measured.policy, 1),
        "flow, error": f"{flow:+.0%}",
    }
