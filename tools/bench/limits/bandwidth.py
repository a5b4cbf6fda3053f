"""What slow lines cost a pipeline: five devices at 1000 and at 125 Mbit/s, side by side.

The bundled target is enlarged to a hidden size of 4,096, so that a segment's hidden states are as
large as a 7B model's; stages and draft take fixed times, so that only the lines differ.
"""

from __future__ import annotations

from pathlib import Path

import torch

from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from asyncspec_nodes.cluster.config import DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from tools.bench.enlarge import Size, enlarge, read_config, size_of
from tools.bench.limits.beds import Speeds, compare
from tools.bench.limits.padded import LEVEL_SECONDS, STAGE_SECONDS, STAGES
from tools.bench.limits.progress import Tick

HIDDEN = 4096
BEDS = ("lan-1000", "lan-125")
TOKENS = {"flowspec": 128, "pruned": 64, "specpipe": 64, "autoregressive": 24}
"""New ones an answer: most for the policy whose share is nearest to what is asked for."""


class Bandwidth(Speeds, frozen=True):
    """By bed and policy."""

    def retention(self, policy: str) -> float:
        """The share of the tokens per second that is left on the slow lines."""
        fast, slow = (self.speeds[bed][policy].tokens_per_second for bed in BEDS)
        return slow / fast


async def measure(folder: Path, tick: Tick) -> Bandwidth:
    """Enlarge the target into ``folder`` and ask both beds, interleaved. Raises
    ``AsyncSpecError``."""
    size = size_of(read_config(BUNDLED_TARGET))
    size = Size(HIDDEN, size.feed_forward, size.layers)
    enlarge(BUNDLED_TARGET, folder, size, torch.bfloat16)
    config = local_config(
        TargetTable(path=str(folder)),
        DraftTable(source=str(BUNDLED_DRAFT)),
        STAGES,
        1,
        stage_pace=PaceTable(seconds=STAGE_SECONDS),
        draft_pace=PaceTable(level_seconds=LEVEL_SECONDS),
    )
    found = await compare({bed: (bed, config) for bed in BEDS}, TOKENS, tick)
    return Bandwidth(found.speeds, found.notes)
