"""A cluster of real stages and a real EAGLE head in the simulator."""

from __future__ import annotations

from typing import Any

import torch

from asyncspec.backend.base import LoadedSource
from asyncspec.core.jobs import DraftResult, FeatureJob, Feed, TensorRows
from asyncspec.core.tensors import WireTensor
from asyncspec.plugins.hf.heads.dflash.source import DFlashSource
from asyncspec.plugins.hf.heads.eagle.source import EagleSource
from asyncspec.plugins.hf.model.wire import select
from asyncspec.sim.costs import Costs
from asyncspec_protocol.ids import SessionId
from backend.stage_cluster import LoadedTarget, StageCluster


class Watched:
    """An EAGLE source that remembers what it was fed, by session."""

    def __init__(self, eagle: EagleSource | DFlashSource) -> None:
        self.eagle = eagle
        self.fed: dict[SessionId, list[torch.Tensor]] = {}

    def run(self, job: FeatureJob) -> DraftResult | None:
        if isinstance(job, Feed):
            fed = self.fed.setdefault(job.session, [])
            assert job.start == sum(map(len, fed))
            fed.extend(select(rows).clone() for rows in job.rows)
        return self.eagle.run(job)

    def abandon(self, job: FeatureJob) -> None:
        self.eagle.abandon(job)

    def pack(self, rows: TensorRows) -> WireTensor:
        return self.eagle.pack(rows)

    def unpack(self, tensor: WireTensor) -> object:
        return self.eagle.unpack(tensor)


class EagleCluster(StageCluster):
    """As ``StageCluster``, with an EAGLE head that is watched."""

    def __init__(
        self,
        costs: Costs,
        loaded: LoadedTarget[Any],
        eagle: EagleSource | DFlashSource,
        **options: Any,
    ) -> None:
        self.watched = Watched(eagle)
        wanted = eagle.features.wanted
        source = LoadedSource(self.watched, features=wanted, tensors=self.watched)
        super().__init__(costs, loaded, source, **options)
