"""A cluster of real stages and a real EAGLE head in the simulator."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from asyncspec.backend.base import WireTensor
from asyncspec.backend.hf.checkpoint import Checkpoint
from asyncspec.backend.hf.eagle.source import HFEagle
from asyncspec.backend.hf.recipe import Recipe
from asyncspec.backend.hf.stage import HFStage, load_stage
from asyncspec.backend.hf.wire import select
from asyncspec.jobs import FeatureJob, Feed, Rows
from asyncspec.sim.world import Actor, Costs
from asyncspec_nodes.machines.draft.machine import DraftMachine
from asyncspec_nodes.machines.verify.machine import VerifyMachine
from asyncspec_nodes.machines.verify.state import VerifyConfig
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import Expanded
from cluster import Cluster


class Watched:
    """An EAGLE source that remembers what it was fed, by session."""

    def __init__(self, eagle: HFEagle) -> None:
        self.eagle = eagle
        self.fed: dict[SessionId, list[torch.Tensor]] = {}

    def run(self, job: FeatureJob) -> Expanded | None:
        if isinstance(job, Feed):
            fed = self.fed.setdefault(job.session, [])
            assert job.start == sum(map(len, fed))
            fed.extend(select(rows).clone() for rows in job.rows)
        return self.eagle.run(job)

    def pack(self, rows: Rows) -> WireTensor:
        return self.eagle.pack(rows)

    def unpack(self, tensor: WireTensor) -> object:
        return self.eagle.unpack(tensor)


class Loaded:
    """A target's stages by their layers, each read once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._made: dict[tuple[int, int], HFStage] = {}

    def stage(self, first: int, end: int) -> HFStage:
        if (first, end) not in self._made:
            self._made[first, end] = load_stage(self.checkpoint, first, end, recipe=Recipe())
        return self._made[first, end]


class EagleCluster(Cluster):
    """As ``Cluster``; a stage that is restarted has forgotten its sessions."""

    def __init__(self, costs: Costs, loaded: Loaded, eagle: HFEagle, **options: Any) -> None:
        self.loaded = loaded
        self.source = Watched(eagle)
        super().__init__(costs, features=eagle.features.wanted, **options)

    def draft(self) -> Actor:
        machine = DraftMachine(self.config)
        return Actor(machine, machine.initial(), self.source.run, self.source)

    def stage(self, rank: Rank) -> Actor:
        facts = self.loaded.checkpoint.facts
        edges = [facts.layers * i // self.stages for i in range(self.stages + 1)]
        first, end = list(pairwise(edges))[rank - 1]
        config = VerifyConfig(
            rank, self.stages, self.window, facts.vocab_size, first, end, facts.layers
        )
        machine, stage = VerifyMachine(config), self.loaded.stage(first, end)
        return Actor(machine, machine.initial(), stage.run, stage)
