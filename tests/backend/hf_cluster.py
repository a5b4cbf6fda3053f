"""A cluster of real stages and a real token source in the simulator."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from asyncspec.backend.base import Quantize
from asyncspec.backend.hf.checkpoint import Checkpoint
from asyncspec.backend.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.backend.hf.stage import HFStage, load_stage
from asyncspec.sim.actor import Actor
from asyncspec.sim.costs import Costs
from asyncspec_nodes.node.loading import Source
from asyncspec_nodes.roles.draft.machine import DraftMachine
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_nodes.roles.verify.session import VerifyConfig
from asyncspec_protocol.ids import DRAFT, Rank
from cluster import Cluster


class Loaded:
    """A target's stages by their layers, each read once."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: str = "auto", quantize: Quantize = "none"
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.quantize = quantize
        self._made: dict[tuple[int, int], HFStage] = {}
        # What the first stage that is read finds, all go by.
        self._recipe: KernelSettings | None = None

    def stage(self, first: int, end: int) -> HFStage:
        if (first, end) not in self._made:
            stage = load_stage(
                self.checkpoint,
                first,
                end,
                settings=self._recipe,
                dtype=self.dtype,
                quantize=self.quantize,
            )
            self._made[first, end], self._recipe = stage, stage.settings
        return self._made[first, end]

    def cut(self, stages: int) -> list[HFStage]:
        """The whole target in ``stages`` stages of about the same depth."""
        layers = self.checkpoint.info.layers
        edges = [layers * i // stages for i in range(stages + 1)]
        return [self.stage(first, end) for first, end in pairwise(edges)]


class HFCluster(Cluster):
    """As ``Cluster``; a stage that is restarted has forgotten its sessions."""

    def __init__(self, costs: Costs, loaded: Loaded, source: Source, **options: Any) -> None:
        self.loaded = loaded
        self.source = source
        vocab = loaded.checkpoint.info.vocab_size
        super().__init__(costs, features=source.features, vocab=vocab, **options)

    def draft(self, rank: Rank = DRAFT) -> Actor:
        machine = DraftMachine(self.draft_config(rank))
        return Actor(machine, machine.initial(), self.source.run, self.source.tensors)

    def stage(self, rank: Rank) -> Actor:
        model_info, stage = self.loaded.checkpoint.info, self.loaded.cut(self.stages)[rank - 1]
        layers = stage.shard.layers
        config = VerifyConfig(
            rank,
            self.stages,
            self.window,
            model_info.vocab_size,
            layers.start,
            layers.stop,
            model_info.layers,
        )
        machine = VerifyMachine(config)
        return Actor(machine, machine.initial(), stage.run, stage)
